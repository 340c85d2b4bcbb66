"""Evaluates a checkpoint."""

from mmslab.cli.test import main

if __name__ == '__main__':
    main()
