"""Folds the norms of a trained detector or classifier: writes its config and checkpoint in the inference form, checked."""

from mmslab.cli.deploy import main

if __name__ == '__main__':
    main()
