"""The small native kernels at every level of instructions, against their references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.cpu import elementwise, native
from ridgeline.kernels.draw_rows import Draws, draw_rows_reference
from ridgeline.kernels.noise import stream_key
from ridgeline.kernels.qk_norm_rope_write import (
    HeadNorms,
    PagedKV,
    plain_views,
    qk_norm_rope_write_reference,
)
from ridgeline.kernels.rms_norm import rms_norm_reference
from ridgeline.kernels.step_inputs import make_step_inputs, step_inputs_reference
from tests.kernels.kv_formats import FORMATS, check_near
from tests.kernels.references import add_norm_reference, silu_mul_reference

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
BEST = native.LEVELS.index(native.best_level())
LEVELS = [level for level in ("avx2", "avx512") if native.LEVELS.index(level) <= BEST]
DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")
each_level = pytest.mark.parametrize("level", LEVELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To one rounding of the dtype more than the reference has."""
    step = 2 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=step, atol=2e-6)


@each_level
@each_dtype
def test_norms(level: str, dtype: torch.dtype) -> None:
    with native.at_level(level):
        for rows, size in ((1, 1), (3, 7), (5, 16), (2, 288), (70, 513)):
            wide = noise(rows, size + 3, seed=size, dtype=dtype)
            x, weight = wide[:, 1 : size + 1], noise(size, seed=1, dtype=dtype)
            close(elementwise.add_norm(None, x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
            delta, total = noise(rows, size, seed=2, dtype=dtype), x.clone()
            wanted = add_norm_reference(delta, total, weight, 1e-5)
            close(elementwise.add_norm(delta, x, weight, 1e-5), wanted)
            close(x, total)
            outside = noise(rows, size + 3, seed=size, dtype=dtype)[:, size + 1 :]
            assert torch.equal(wide[:, size + 1 :], outside)


@each_level
@each_dtype
def test_gates(level: str, dtype: torch.dtype) -> None:
    with native.at_level(level):
        for rows, size in ((1, 1), (3, 15), (4, 768), (40, 1024)):
            x = noise(rows, 2 * size, seed=size, dtype=dtype) * 6
            close(elementwise.silu_mul(x), silu_mul_reference(x))
        x = torch.tensor([[-200.0, -88.0, 0.0, 90.0, 1e4, 2.0, 2.0, 2.0, 2.0, 2.0]], dtype=dtype)
        close(elementwise.silu_mul(x), silu_mul_reference(x))


@each_level
@each_dtype
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_and_write(level: str, dtype: torch.dtype, has_norms: bool) -> None:
    for heads, kv_heads, size, tokens in (
        (6, 2, 64, 5),
        (3, 3, 48, 1),
        (2, 1, 10, 9),
        (4, 2, 24, 80),
    ):
        qkv = noise(tokens, (heads + 2 * kv_heads) * size, seed=size, dtype=dtype)
        table = noise(100, 2, size, seed=1)
        positions = torch.arange(tokens) * 7 % 100
        slots = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:tokens]
        slots[tokens // 2] = -1 if tokens > 2 else slots[tokens // 2]
        norms = None
        if has_norms:
            weights = noise(2, size, seed=4, dtype=dtype)
            norms = HeadNorms(weights[0], weights[1], 1e-6)
        stores = [torch.full((24, 4, 2 * kv_heads * size), 5.0, dtype=dtype) for _ in range(2)]
        there, here = (plain_views(store, kv_heads) for store in stores)
        wanted = qk_norm_rope_write_reference(qkv, table, positions, slots, there, norms=norms)
        with native.at_level(level):
            found = elementwise.rotate_and_write(qkv, table, positions, slots, here, norms)
        close(found, wanted)
        close(stores[1], stores[0])
        assert isinstance(here, PagedKV)


@each_level
@each_dtype
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_rotation_and_write_of_codes(level: str, dtype: torch.dtype, name: str) -> None:
    """The codes and scales of what the reference writes in float32; a code may be the next one,
    where sums of another order come to lie on the other side of a half."""
    shapes = ((6, 2, 64, 5), (3, 3, 46, 1), (2, 1, 10, 9))
    if name == "int4":
        shapes = ((6, 2, 64, 5), (3, 3, 16, 1), (2, 1, 32, 9))
    for heads, kv_heads, size, tokens in shapes:
        qkv = noise(tokens, (heads + 2 * kv_heads) * size, seed=size, dtype=dtype)
        qkv[0, heads * size] = 1e-9
        table, positions = noise(100, 2, size, seed=1), torch.arange(tokens) * 7 % 100
        slots = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:tokens]
        there = torch.zeros(24, 4, 2 * kv_heads * size)
        wanted = qk_norm_rope_write_reference(
            qkv, table, positions, slots, plain_views(there, kv_heads)
        )
        kind, exact = FORMATS[name](), FORMATS[name]()
        store, ideal = (k.allocate(24, 4, kv_heads, size, dtype, CPU) for k in (kind, exact))
        exact.write(ideal, torch.arange(96), there.view(96, -1))
        slots[-1] = -1 if tokens > 2 else slots[-1]
        here = kind.views(store, kv_heads, size)
        assert here is not None
        with native.at_level(level):
            found = elementwise.rotate_and_write(qkv, table, positions, slots, here, None)
        close(found, wanted)
        kept = slots[slots >= 0]
        check_near(store, ideal, kept)
        untouched = torch.ones(96, dtype=torch.bool).index_fill_(0, kept, False)
        assert not store[0].view(torch.uint8).flatten(0, 1)[untouched].any()


@each_level
@each_dtype
@pytest.mark.parametrize("size", [1, 15, 300, 40000])
def test_draws(level: str, dtype: torch.dtype, size: int) -> None:
    """What the reference draws, but where two scores are as good as equal."""
    logits = noise(6, size, seed=size, dtype=dtype) * 3
    logits[1, size // 2] = torch.nan
    logits[2] = 1.0
    logits[3, size - 1] = torch.inf
    positions = torch.arange(6) + 11
    keys = torch.tensor([stream_key(seed) for seed in range(6)])
    temperatures = torch.tensor([1.0, 1.0, 0.5, 1.0, 2.0, 0.7])
    draws = Draws(keys, temperatures, torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    for wanted_draws in (None, draws):
        wanted, is_sound = draw_rows_reference(logits, positions, wanted_draws)
        with native.at_level(level):
            found, found_sound = elementwise.draw_rows(logits, positions, wanted_draws)
        assert found_sound.tolist() == is_sound.tolist()
        assert found.tolist() == wanted.tolist()


def test_draws_follow_the_softmax() -> None:
    """Not by the reference's numbers: shares of 4000 draws, each within 5 standard deviations."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(4000, 4).contiguous()
    keys = torch.tensor([stream_key(seed) for seed in range(4000)])
    draws = Draws(keys, torch.ones(4000), torch.ones(4000))
    ids, _ = elementwise.draw_rows(logits, torch.zeros(4000, dtype=torch.int64), draws)
    shares, wanted = ids.bincount(minlength=4) / 4000, logits[0].softmax(0)
    assert ((shares - wanted).abs() < 5 * (wanted * (1 - wanted) / 4000).sqrt()).all()


@pytest.mark.parametrize("line", range(4))
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda x: x.repeat_interleave(2)[::2], "contiguous lines"),
        (lambda x: x[:1].expand(3), "contiguous lines"),
        (lambda x: x[:2], "a number for each row"),
        (lambda x: x.to(torch.float64), "a known dtype"),
    ],
)
def test_what_the_kernel_would_read_wrongly(
    line: int, spoil: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    lines = [torch.arange(3), torch.arange(3), torch.ones(3), torch.ones(3)]
    elementwise.draw_rows(noise(3, 8), lines[0], Draws(*lines[1:]))
    lines[line] = spoil(lines[line])
    with pytest.raises(InternalError, match=says):
        elementwise.draw_rows(noise(3, 8), lines[0], Draws(*lines[1:]))


def test_inputs_and_the_last_tokens() -> None:
    for groups, rows in ((1, 1), (2, 5)):
        places = torch.randperm(8, generator=torch.Generator().manual_seed(rows))[:rows]
        sent = torch.full((2 + groups, rows), -1)
        sent[0], sent[1] = places, torch.arange(rows) * 9 + 3
        sent[2:, rows // 2] = 77
        last_ids = torch.arange(8) + 100
        tables = [torch.arange(groups * 8 * 12).int().view(groups, 8, 12) for _ in range(2)]
        outs = [make_step_inputs(groups, rows, CPU) for _ in range(2)]
        step_inputs_reference(sent, last_ids, tables[0], outs[0], 4)
        elementwise.step_inputs(sent, last_ids, tables[1], outs[1], 4)
        assert torch.equal(tables[0], tables[1])
        for field in ("token_ids_B", "positions_B", "next_positions_B", "seq_lens_B", "slots_gB"):
            assert torch.equal(getattr(outs[0], field), getattr(outs[1], field)), field
    ids, is_sound = torch.tensor([5, 0, 7]), torch.tensor([True, False, True])
    out = torch.empty(3, dtype=torch.int64)
    elementwise.remember(ids, is_sound, torch.tensor([4, 1, 2]), last_ids, out)
    assert out.tolist() == [5, -1, 7]
    assert last_ids.tolist() == [100, 0, 7, 103, 5, 105, 106, 107]
