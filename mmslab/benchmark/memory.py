"""The memory that one forward takes beyond what is there before it."""

import os
from typing import Any, Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_memory(call: Callable[[], Any], device: torch.device = torch.device('cpu')) -> int:
    """The most bytes that torch's allocator holds at once during ``call``, beyond those that it holds before.

    Weights and input are there before, and so are the other models of a benchmark. On a GPU it is the allocator's own record;
    on a CPU, where there is none, the peak of the running sum of what torch's profiler sees allocated and released of it.
    What libraries allocate past torch (oneDNN's scratch pads, cuDNN's contexts) is not in it.
    """
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault('KINETO_LOG_LEVEL', '5')  # else it reports, as an error, that there is no GPU
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():  # in the order of time
        if event.name() == '[memory]':
            held += event.nbytes()
            peak = max(peak, held)
    return peak
