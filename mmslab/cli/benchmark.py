"""Measures latency, throughput, parameters, FLOPs and memory of detectors, classifiers or their backbones.

Several configs are measured interleaved, round by round, in a fresh process whose threads are pinned to cores, so that their
ratio holds on a noisy machine; it also differs from process to process, so that a ratio to rely on takes several (--processes 5).
Weights are random, so nothing is downloaded; models with PRepBN are measured folded.
"""

import argparse
from typing import Optional, Sequence

from rich.console import Console

from ..benchmark.allocators import ALLOCATORS
from ..benchmark.models import DTYPES, Settings
from ..benchmark.report import machine_line, table
from ..benchmark.run import run_with_allocators
from ..errors import input_errors


def parse_args(argv: Optional[Sequence[str]], prog: Optional[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'configs', nargs='+', metavar='CONFIG', help='config files, or names as maskrcnn_slab_swin_t_1x or mmdet::...'
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    for name, what in (
        ('latency', 'milliseconds for one image'),
        ('throughput', 'images per second at --batch-size'),
        ('flops', 'parameters, FLOPs and memory alone; the other two have them too'),
    ):
        mode.add_argument(f'--{name}', dest='mode', action='store_const', const=name, default='latency', help=what)
    mode.add_argument(
        '--protocol',
        metavar='paper',
        help="that of the paper's Table 3: a whole detector, one image of 800x1333, the mean of 100 rounds in one process",
    )
    parser.add_argument(
        '--checkpoint', nargs='+', action='extend', metavar='FILE', help='one for each config, in their order'
    )
    parser.add_argument('--scope', default='model', help="'model', the whole of it (default), or 'backbone'")
    parser.add_argument(
        '--image',
        type=int,
        nargs=2,
        metavar=('H', 'W'),
        help='pixels before padding (default: 800 1333 for the latency of a detector, else 224 224)',
    )
    parser.add_argument(
        '--scales',
        type=int,
        nargs='+',
        default=(1,),
        metavar='N',
        help='measure at so many times these sides, as 1 2 4; adds a column of time per pixel',
    )
    parser.add_argument('--batch-size', type=int, help='images at a time, for --throughput (default: 64)')
    parser.add_argument('--rounds', type=int, default=100, help='times that each is measured (default: 100)')
    parser.add_argument('--warmup', type=int, default=10, help='rounds before them (default: 10)')
    parser.add_argument('--no-fold', action='store_true', help='measure unfolded models too, beside the folded')
    parser.add_argument('--dtype', default='fp32', help=f'{", ".join(DTYPES)} (default: fp32)')
    parser.add_argument('--device', help="'cpu', 'cuda:0', ... (default: a GPU if there is one)")
    parser.add_argument('--threads', type=int, help='threads of torch on the CPU, on the first so many of its cores')
    parser.add_argument(
        '--no-pin', dest='pin', action='store_false', help='leave it to the system which core a thread has'
    )
    parser.add_argument(
        '--processes', type=int, default=1, help='fresh processes, one after the other (default: 1; 0: in this one)'
    )
    parser.add_argument(
        '--allocator',
        type=lambda names: names.split(','),
        default=(None,),
        metavar='NAME[,NAME]',
        help=f'{", ".join(ALLOCATORS)}: preload it; several take turns, and each has its table (default: what is there)',
    )
    parser.add_argument('--compile', action='store_true', help='torch.compile; of a detector, backbone and neck')
    parser.add_argument('--cuda-graph', action='store_true', help='replay a CUDA graph; not for a whole detector')
    parser.add_argument('--channels-last', action='store_true', help='memory format of weights and input')
    parser.add_argument('--seed', type=int, default=0, help='of random weights and input')
    parser.add_argument('--json', metavar='FILE', help='write all of it, with the time of each round')
    parser.add_argument('--plot', metavar='FILE', help="draw the paper's accuracy against the measured time")
    parser.add_argument('--force', action='store_true', help='replace these files')
    parser.add_argument('--trust-checkpoint', action='store_true', help='unpickle checkpoints that hold any object')
    return parser.parse_intermixed_args(argv)


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    args = vars(parse_args(argv, prog))
    configs, checkpoints = args.pop('configs'), args.pop('checkpoint')
    outputs = {k: args.pop(k) for k in ('json', 'plot', 'force', 'trust_checkpoint')}
    args['image'] = args['image'] and tuple(args['image'])
    allocators = args.pop('allocator')
    with input_errors():
        reports = run_with_allocators(configs, Settings(**args), allocators, checkpoints, **outputs)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for report in reports:
        console.print(table(report))
        for line in [*report.notes(), f'measured on {machine_line(report.machine)}']:
            console.print(line, highlight=False, soft_wrap=True)
