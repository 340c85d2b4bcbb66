"""Trains a detector or classifier from a config."""

from mmslab.cli.train import main

if __name__ == '__main__':
    main()
