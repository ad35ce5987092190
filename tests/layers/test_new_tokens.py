"""A step with several new tokens of each request gives each the logits that it has one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.attention.backend import CapturesDecodes
from ridgeline.attention.layout import AttentionLayout, DecodeLayout, ForwardBatch
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
PROMPTS = {"a": 1, "b": 23, "c": 6}


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
        if isinstance(ours.decoder.backend, CapturesDecodes):
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
