"""Several processes: what a launcher must have set, and how they work together where there is no GPU."""

import os
import shutil
import subprocess
from datetime import timedelta
from typing import Optional

import torch
import torch.nn as nn
from mmengine.dist import is_distributed
from torch import Tensor, distributed
from torch.distributed.nn.functional import all_reduce

from .layers.norm import RepBN, TokenBN

# launcher: what it sets, and who starts processes so
LAUNCHERS = {
    'pytorch': (
        ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'),
        'torchrun, as tools/dist_train.sh and tools/dist_test.sh do',
    ),
    'slurm': (
        ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_NODELIST'),
        'srun, as tools/slurm_train.sh and tools/slurm_test.sh do',
    ),
    'mpi': (
        ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK', 'MASTER_ADDR'),
        'mpirun of Open MPI, with -x MASTER_ADDR',
    ),
}


def check_launcher(launcher: str) -> None:
    """Raises ValueError unless ``launcher`` is 'none', or one that has started this process."""
    if launcher == 'none' or is_distributed():
        return
    if launcher not in LAUNCHERS:
        raise ValueError(f'launcher must be none, {", ".join(LAUNCHERS)}, but got {launcher!r}.')
    variables, starter = LAUNCHERS[launcher]
    missing = [name for name in variables if name not in os.environ]
    if missing:
        raise ValueError(
            f'--launcher {launcher} is for processes started by {starter}; here {", ".join(missing)} is not set. Start it so, '
            'or leave --launcher out to run in one process.'
        )
    if launcher == 'slurm' and 'MASTER_ADDR' not in os.environ and shutil.which('scontrol') is None:
        raise ValueError(
            '--launcher slurm asks scontrol for the name of the first machine, and scontrol is not on the PATH. Set MASTER_ADDR '
            'to that name.'
        )


def start_on_cpu(launcher: str, dist_cfg: Optional[dict] = None) -> str:
    """Starts the process group as mmengine's ``init_dist`` does, without choosing a GPU, and by gloo in nccl's place.

    Args:
        launcher (str): 'pytorch', 'slurm' or 'mpi'; see :func:`check_launcher`.
        dist_cfg (dict, optional): The config's ``env_cfg.dist_cfg``.

    Returns:
        str: What to tell of it.
    """
    options, env = dict(dist_cfg or {}), os.environ
    asked = options.pop('backend', 'nccl')
    backend = 'gloo' if asked == 'nccl' else asked
    options.pop('init_backend', None)
    port = options.pop('port', None)
    if options.get('timeout') is not None:
        options['timeout'] = timedelta(seconds=options['timeout'])
    if launcher == 'slurm':
        env.update(RANK=env['SLURM_PROCID'], WORLD_SIZE=env['SLURM_NTASKS'], LOCAL_RANK=env.get('SLURM_LOCALID', '0'))
        if 'MASTER_ADDR' not in env:
            command = ['scontrol', 'show', 'hostnames', env['SLURM_NODELIST']]
            env['MASTER_ADDR'] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        if port is not None:
            env['MASTER_PORT'] = str(port)
    elif launcher == 'mpi':
        env.update(RANK=env['OMPI_COMM_WORLD_RANK'], WORLD_SIZE=env['OMPI_COMM_WORLD_SIZE'])
    env.setdefault('MASTER_PORT', '29500')
    distributed.init_process_group(backend, **options)
    instead = ', in the place of nccl (env_cfg.dist_cfg.backend), which is for GPUs' if backend != asked else ''
    return f'there is no GPU: {distributed.get_world_size()} processes on CPUs, which talk by {backend}{instead}'


def check_sync_bn(implementation: str, model: nn.Module, device: str) -> None:
    """Raises ValueError unless ``sync_bn=implementation`` synchronizes the statistics of ``model``'s norms on ``device``."""
    if implementation == 'torch':
        return
    if implementation != 'mmcv':
        raise ValueError(
            f"sync_bn={implementation!r} in the config is neither 'torch' nor 'mmcv'. Use sync_bn='torch'."
        )
    ours = any(isinstance(m, (RepBN, TokenBN)) for m in model.modules())
    if ours or device == 'cpu':
        # mmcv's is no BatchNorm to torch: norm_eval and BN recalibration would pass it over
        reason = 'does not work with norm_eval and BN recalibration of PRepBN, RepBN and BN' if ours else 'needs a GPU'
        raise ValueError(f"sync_bn='mmcv' {reason}. Use sync_bn='torch'.")


class SyncBatchNormOnCPU(nn.BatchNorm1d):
    """What torch's SyncBatchNorm, which takes tensors on GPUs alone, computes: ``(N, C, ...)`` to the same.

    In training the mean and then the variance are summed up over what all ranks have, and gradients flow through both sums.

    Raises:
        ValueError: For an input without channels.
    """

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f'BatchNorm takes (N, C, ...), but got an input of shape {tuple(x.shape)}.')

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        y = x.to(torch.promote_types(x.dtype, torch.float32))  # autocast's bfloat16 is too coarse for sums
        sums = all_reduce(torch.cat([y.sum(dims), y.new_tensor([x.numel() // x.shape[1]])]))
        number = sums[-1].detach()
        mean = sums[:-1] / number
        y = y - mean.view(shape)
        var = all_reduce(y.square().sum(dims)) / number
        if self.track_running_stats:
            self.num_batches_tracked.add_(1)
            factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            unbiased = var.detach() * number / (number - 1).clamp(min=1)
            for running, value in ((self.running_mean, mean.detach()), (self.running_var, unbiased)):
                running.mul_(1 - factor).add_(value.to(running.dtype), alpha=factor)
        y = y * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)


def sync_on_cpu(model: nn.Module, all_norms: bool) -> None:
    """Makes the SyncBatchNorms of ``model``, in place, such that work on a CPU; with ``all_norms`` all BatchNorms."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm if all_norms else nn.SyncBatchNorm):
            module.__class__ = SyncBatchNormOnCPU
