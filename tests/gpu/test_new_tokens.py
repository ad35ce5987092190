"""On a GPU several new tokens of each request are answered as by the definition, in bfloat16 and
over a cache in e4m3, with the tiles that are chosen for so many rows; and as one by one."""

from __future__ import annotations

import random

import pytest
import torch

from ridgeline.architectures import read_spec
from tests.kernels.test_paged_decode import Case, lose
from tests.layers.driving import Driver, build_decoder
from tests.layers.reference_models import VOCAB, tiny_config
from tests.layers.test_new_tokens import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ERROR = 1e-2  # of the answer's norm: weights and answers have 8 bits


@pytest.mark.parametrize("cached", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_requests", [1, 5, 80])
@pytest.mark.parametrize("new", [2, 3, 5, 9, 17])
@pytest.mark.parametrize("window", [None, 100])
def test_the_kernel(
    new: int, num_requests: int, cached: torch.dtype | None, window: int | None
) -> None:
    rng = random.Random(new)
    lengths = [new + rng.choice((0, 1, 30, 700, 2100)) for _ in range(num_requests)]
    case = Case(
        lengths,
        [new] * num_requests,
        heads=(8, 2),
        head_dim=128,
        dtype=torch.bfloat16,
        window=window,
        cached=cached,
    )
    want = case.expected()[:-1]
    seen = lose(case, [rng.randrange(new) for _ in lengths])
    got = case.run(case.schedule())[:-1].float()
    off = (got[seen] - want[seen]).norm(dim=2) / want[seen].norm(dim=2)
    assert float(off.max()) < ERROR
    assert got[~seen].isnan().all()


@pytest.mark.parametrize("kv_format", ["auto", "fp8", "int8", "int4"])
@pytest.mark.parametrize("num_new", [2, 5, 8])
def test_a_decoder(num_new: int, kv_format: str) -> None:
    """One by one goes through the kernel that takes the product of q, k and v."""
    config = tiny_config("qwen3", head_dim=128, hidden_size=256, intermediate_size=512)
    spec = read_spec(config, max_model_len=128)
    rng = random.Random(num_new)
    decoder = build_decoder(
        spec, max_model_len=128, dtype=torch.bfloat16, device="cuda", kv_format=kv_format
    )
    decoder.randomize(7)
    drivers = [Driver(decoder, block_size=16, kv_format=kv_format) for _ in range(2)]
    prompts = {r: [rng.randrange(3, VOCAB) for _ in range(n)] for r, n in (("a", 40), ("b", 3))}
    for driver in drivers:
        driver.step(prompts)
    work = {r: [rng.randrange(3, VOCAB) for _ in range(num_new)] for r in prompts}
    out_TV = torch.empty(2 * num_new, VOCAB, device="cuda")
    batch = captured(drivers[0].batch(work), num_new)
    decoder.forward_logits(batch, drivers[0].kv, out_TV)
    got = dict(zip(work, torch.split(out_TV, num_new), strict=True))
    for place in range(num_new):
        one_TV = torch.empty(2, VOCAB, device="cuda")
        one = drivers[1].batch({r: tokens[place : place + 1] for r, tokens in work.items()})
        decoder.forward_logits(captured(one, 1), drivers[1].kv, one_TV)
        for r, want in zip(work, one_TV, strict=True):
            off = float((got[r][place] - want).norm() / want.norm())
            assert off < 5e-2, f"{r}, token {place}: {off}"
