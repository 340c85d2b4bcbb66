"""Draws the handover of a training, layer by layer."""

from mmslab.cli.analyze import main

if __name__ == '__main__':
    main()
