"""What drafting is said to take is what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.kernels import drafts
from ridgeline.speculation import draft_model
from ridgeline.speculation import memory as draft_memory
from ridgeline.speculation.draft_model import EarlyLayers, open_draft_model
from ridgeline.speculation.memory import DraftSetting
from tests.speculation.scene import BLOCK_SIZE, MAX_MODEL_LEN, VOCAB, make_cache, make_decoder

SETTING = DraftSetting(
    max_model_len=MAX_MODEL_LEN,
    max_num_batched_tokens=64,
    block_size=BLOCK_SIZE,
    num_rows=32,
    max_draft_tokens=8,
    max_rows=16,
    max_logit_rows=64,
    dtype_bytes=4,
    kind="cpu",
)
WINDOWS: dict[str, Any] = {
    "model_type": "qwen3",
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 2,
    "num_hidden_layers": 4,
}
SIZES = {"max_draft_tokens": 8, "max_rows": 16, "max_logit_rows": 64}
SLACK = 1024  # bytes of small things


def by_name(memory: draft_memory.DraftMemory) -> dict[str, int]:
    return {item.what: item.bytes for item in memory.items}


@pytest.mark.parametrize("draft_ids", [VOCAB, VOCAB - 20, VOCAB + 20])
@pytest.mark.parametrize("changes", [{}, WINDOWS], ids=["plain", "windows"])
@pytest.mark.parametrize("kv_format", ["auto", "fp8"])
def test_of_a_draft_model(draft_ids: int, changes: dict[str, Any], kv_format: str) -> None:
    target = make_decoder(**changes)
    small = make_decoder(min_token_ids=VOCAB, vocab_size=draft_ids, hidden_size=16, **changes)
    method = open_draft_model(small, target, make_cache(target), kv_format=kv_format, **SIZES)
    setting = replace(SETTING, kv_format=kv_format)
    memory = draft_memory.draft_model(target.spec, small.spec, setting)
    items = by_name(memory)
    assert items["draft weights"] == small.num_bytes
    assert memory.block_bytes * (method.kv.num_blocks + 1) == method.kv.num_bytes
    tables = sum(rotation.table_L2D.nbytes for rotation in small.rotations)
    assert items["draft tables"] == tables
    beside = method.num_bytes - small.num_bytes - method.kv.num_bytes
    assert beside <= items["draft logits"] + SLACK
    assert items["draft logits"] <= beside + SLACK
    assert "draft activations" not in items


def test_of_early_layers() -> None:
    target = make_decoder()
    method = EarlyLayers(target, make_cache(target), num_layers=1, **SIZES)
    memory = draft_memory.early_layers(target.spec, SETTING)
    assert abs(by_name(memory)["draft logits"] - method.num_bytes) < SLACK
    assert memory.block_bytes == 0


def test_of_rows_of_tokens() -> None:
    made = drafts.make_history(32, MAX_MODEL_LEN, 8, torch.device("cpu"))
    taken = made.tokens_NL.nbytes + made.lens_N.nbytes + made.found_N.nbytes
    memory = draft_memory.looking_up(SETTING)
    assert by_name(memory) == {"token rows": taken}
    assert memory.total_bytes == taken


def test_a_draft_that_is_wider_than_its_target() -> None:
    target = make_decoder()
    wide = make_decoder(hidden_size=256, intermediate_size=1024)
    items = by_name(draft_memory.draft_model(target.spec, wide.spec, SETTING))
    assert items["draft activations"] > 64 * 256 * 4


def test_a_draft_that_finds_no_tables() -> None:
    target = make_decoder(model_type="mistral", sliding_window=9)
    with pytest.raises(ConfigError, match="no block tables"):
        draft_memory.draft_model(target.spec, make_decoder().spec, SETTING)


def test_the_numbers_are_those_of_the_code() -> None:
    assert draft_memory.PADDING_LENGTH == drafts.PADDING_LENGTH
    assert draft_memory.DRAW_CHUNK == draft_model.DRAW_CHUNK
    assert draft_memory.PASS_TOKENS == draft_model.UNSEEN
