"""Draws the boxes and masks that a detector finds in images or a video, and writes them as JSON."""

from mmslab.cli.infer import main

if __name__ == '__main__':
    main()
