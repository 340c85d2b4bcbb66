"""Writes a trained model in its folded form as ONNX or torch.export's .pt2, for images of any size, checked."""

from mmslab.cli.export import main

if __name__ == '__main__':
    main()
