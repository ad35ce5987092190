"""Does the bandwidth probe touch the bytes it counts?"""

from __future__ import annotations

import torch

from ridgeline.measure.machine import measure_bandwidth


def test_figures_are_of_the_right_size() -> None:
    found = measure_bandwidth(torch.device("cpu"), 4 << 20)
    assert (found.device, found.buffer_bytes) == ("cpu", 4 << 20)
    assert found.threads == torch.get_num_threads()
    # Any machine that runs this reads between 0.1 GB/s and 100 TB/s.
    assert 1e8 < found.read_bytes_per_s < 1e14
    assert 1e8 < found.copy_bytes_per_s < 1e14
