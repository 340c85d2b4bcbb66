"""Measures latency, throughput, parameters, FLOPs and memory of detectors, classifiers or their backbones."""

from mmslab.cli.benchmark import main

if __name__ == '__main__':
    main()
