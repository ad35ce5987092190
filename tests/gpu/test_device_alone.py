"""On a GPU steps are timed on the device alone, and nothing of them is lost by it."""

from __future__ import annotations

import pytest
import torch

from ridgeline.measure.models import config
from ridgeline.measure.steps import random_engine, step_bench
from ridgeline.measure.stopwatch import open_device_timer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LEAST = config(256, 2, 4, 2, 768, 4096)
OPTIONS = {"device": "cuda", "dtype": "bfloat16", "num_blocks": 400, "max_num_seqs": 8}


def test_the_device_is_timed_by_its_own_clock() -> None:
    timer = open_device_timer(torch.device("cuda"))
    assert timer is not None
    x = torch.zeros(1 << 20, device="cuda").add_(1.0)
    torch.cuda.synchronize()  # a first use takes longer than any pause
    assert timer.send(lambda: x.add_(1.0)) is x
    assert (timer.take() or 0.0) > 0.0
    assert timer.take() is None


@pytest.mark.parametrize(
    ("speculate", "num_draft_tokens"), [("off", 0), ("early:1", 0), ("early:1", 3)]
)
def test_steps_are_timed_alone(speculate: str, num_draft_tokens: int) -> None:
    with random_engine(LEAST, **OPTIONS, speculate=speculate) as built:
        bench = step_bench(built)
        assert bench.most_alone >= 8
        found = bench.alone(4, 100, num_draft_tokens, steps=4)
        assert len(found.seconds) == 4
        assert min(found.seconds) > 0.0
        assert [new for new, _ in found.shape] == [num_draft_tokens + 1] * 4
        assert bench.engine.is_idle
        bench.engine.scheduler.check_invariants()
