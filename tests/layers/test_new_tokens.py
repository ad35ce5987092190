"""A step with several new tokens of each request gives each the logits that it has one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.attention.layout import AttentionLayout, DecodeLayout, ForwardBatch
from ridgeline.kernels.cpu import native
from tests.layers.driving import Driver, build_decoder
from tests.layers.reference_models import VOCAB, tiny_config

LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": tiny_config("llama"),
    "llama one kv head": tiny_config("llama", num_key_value_heads=1),
    "mistral window": tiny_config("mistral", sliding_window=5),
    "qwen3": tiny_config("qwen3"),
    "qwen3 both": tiny_config(
        "qwen3", use_sliding_window=True, sliding_window=9, layer_types=LAYERS
    ),
}
FULL = {"vocab_size": 96, "max_position_embeddings": 1024}  # of native panels; several parts
PACKED = {
    "llama": tiny_config("llama", **FULL),
    "qwen3 both": tiny_config(
        "qwen3", use_sliding_window=True, sliding_window=9, layer_types=LAYERS, **FULL
    ),
}
PROMPTS = {"a": 1, "b": 23, "c": 6}
# Of vectors; AMX's tiles have sums of their own for more than four rows.
BEST = native.LEVELS.index(native.best_level())
LEVELS = [name for name in ("avx2", "avx512", "bf16") if native.LEVELS.index(name) <= BEST]


def captured(batch: ForwardBatch, num_new: int) -> ForwardBatch:
    """The same step as a captured one sees it."""
    layout = batch.layout
    assert isinstance(layout, AttentionLayout)
    num, device = len(layout.seq_lens), batch.token_ids_T.device
    new = DecodeLayout(
        torch.arange(num, device=device),
        layout.block_tables_BM,
        torch.tensor(layout.seq_lens, dtype=torch.int32, device=device),
        torch.tensor(layout.query_start, dtype=torch.int32, device=device),
        layout.slots_T,
        layout.block_size,
        num_new,
    )
    return replace(batch, layout=new)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_new", [2, 5, 8])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_several_at_once_are_as_one_by_one(name: str, num_new: int, backend: str) -> None:
    """One by one by the reference; at once by the backend that captures, or by the reference."""
    rng = random.Random(num_new)
    spec = read_spec(CONFIGS[name], max_model_len=128)
    drivers = []
    for kind in (backend, "reference"):
        decoder = build_decoder(spec, max_model_len=128, backend=kind)
        decoder.randomize(7)
        drivers.append(Driver(decoder, poison=kind == "auto"))
    ours, slow = drivers
    prompts = {r: [rng.randrange(3, VOCAB) for _ in range(n)] for r, n in PROMPTS.items()}
    for driver in drivers:
        driver.step(prompts)
    for _ in range(2):
        work = {r: [rng.randrange(3, VOCAB) for _ in range(num_new)] for r in prompts}
        batch = ours.batch(work)
        if ours.decoder.backend.captures_decodes:
            batch = captured(batch, num_new)
        out_TV = torch.empty(
            len(prompts) * num_new, VOCAB, dtype=torch.float32, device=ours.decoder.device
        )
        ours.decoder.forward_logits(batch, ours.kv, out_TV)
        got = dict(zip(work, torch.split(out_TV.cpu(), num_new), strict=True))
        for place in range(num_new):
            want = slow.step({r: tokens[place : place + 1] for r, tokens in work.items()})
            for r, logits in want.items():
                scale = float(logits.abs().max())
                off = float((got[r][place] - logits[0]).abs().max())
                assert off < 1e-4 * scale, f"{r}, token {place}: {off} of {scale}"


def logits_of(driver: Driver, work: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Of a captured step, [new tokens, V] of each request."""
    num_new = len(next(iter(work.values())))
    out_TV = torch.empty(len(work) * num_new, driver.decoder.spec.vocab_size)
    batch = captured(driver.batch(work), num_new)
    driver.decoder.forward_logits(batch, driver.kv, out_TV)
    return dict(zip(work, torch.split(out_TV, num_new), strict=True))


def check_same_bits(
    name: str, lengths: tuple[int, ...], num_new: int, weights: str, kv: str
) -> None:
    rng = random.Random(num_new)
    spec = read_spec(PACKED[name], max_model_len=1024)
    prompts = {str(n): [rng.randrange(3, 96) for _ in range(n)] for n in lengths}
    drivers = []
    for _ in range(2):
        decoder = build_decoder(
            spec, max_model_len=1024, dtype=torch.bfloat16, device="cpu", weight_format=weights,
            kv_format=kv,
        )  # fmt: skip
        decoder.randomize(7)
        drivers.append(Driver(decoder, kv_format=kv))
        drivers[-1].step(prompts)
    at_once, one_by_one = drivers
    for _ in range(2):
        work = {r: [rng.randrange(3, 96) for _ in range(num_new)] for r in prompts}
        got = logits_of(at_once, work)
        for place in range(num_new):
            for r, tokens in work.items():
                want = logits_of(one_by_one, {r: tokens[place : place + 1]})[r]
                assert torch.equal(got[r][place], want[0]), f"{r}, token {place} of {num_new}"


@pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("weights", ["plain", "int8", "int4"])
def test_the_same_bits_as_one_by_one(weights: str, kv: str, level: str) -> None:
    """No tolerance: greedy and seeded answers do not depend on how many drafts are checked."""
    before = torch.get_num_threads()
    native.set_threads(2)
    try:
        with native.at_level(level):
            for num_new in range(2, 8):
                check_same_bits("llama", (700,), num_new, weights, kv)
            check_same_bits("qwen3 both", (9, 60), 3, weights, kv)
    finally:
        native.set_threads(before)
