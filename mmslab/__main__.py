"""``python -m mmslab COMMAND ...``, as torchrun and srun start it."""

from .cli import main

if __name__ == '__main__':
    main()
