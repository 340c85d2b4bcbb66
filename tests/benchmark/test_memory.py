import torch
import torch.nn as nn

from mmslab.benchmark.memory import peak_memory


def test_peak_of_allocations_by_hand():
    def call():
        a = torch.empty(1000, 1000)  # 4 MB
        b = torch.empty(500, 1000)  # and 2 MB: the peak
        del a
        return b, torch.empty(750, 1000)  # 3 MB, where 4 were

    assert peak_memory(call) == 6_000_000


def test_peak_of_a_module_leaves_its_weights_and_input_out():
    """Two layers without bias: the input of the second is let go only after its output is there."""
    model = nn.Sequential(nn.Linear(64, 1024, bias=False), nn.Linear(1024, 512, bias=False)).eval()
    x = torch.randn(128, 64)
    with torch.inference_mode():
        assert peak_memory(lambda: model(x)) == 128 * (1024 + 512) * 4
        assert peak_memory(lambda: model(x)) == 128 * (1024 + 512) * 4
