"""``mmslab COMMAND ...``, and ``python -m mmslab COMMAND ...``: a command is a module, with the arguments of its tools/*.py."""

import argparse
import sys
from importlib import import_module
from typing import Optional, Sequence

from ..version import __version__

COMMANDS = {
    'new-config': 'write a config for a data set of your own',
    'train': 'train a detector or classifier from a config',
    'test': 'evaluate a checkpoint',
    'infer': 'draw what a detector finds in images or a video, and write it as JSON',
    'demo': 'train, recalibrate, evaluate, draw, fold and time a small detector on shapes that it makes',
    'benchmark': 'measure latency, throughput, parameters, FLOPs and memory',
    'deploy': 'fold the norms of a trained model',
    'export': 'write a trained model as ONNX or .pt2',
    'analyze': 'draw the handover of a training, layer by layer',
    'convert': 'write weights of others under our key names',
    'doctor': 'say what is installed and what is wrong with it, with the remedy',
}


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Runs the command that ``argv`` (by default the program's arguments) names, with what follows it."""
    names = '\n'.join(f'  {name:<12}{what}' for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog='mmslab',
        description='SLAB backbones for MMDetection: train, fold, export, measure.',
        epilog=f'commands:\n{names}\n\nmmslab COMMAND --help says what each takes.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--version', action='version', version=f'mmslab {__version__}')
    parser.add_argument('command', choices=COMMANDS, metavar='COMMAND', help='one of those below')
    given = list(sys.argv[1:] if argv is None else argv)
    if not given:
        parser.print_help()
        return
    args = parser.parse_args(given[:1])
    import_module(f'.{args.command.replace("-", "_")}', __name__).main(given[1:], prog=f'mmslab {args.command}')
