"""Writes weights that others published under mmslab's key names."""

from mmslab.cli.convert import main

if __name__ == '__main__':
    main()
