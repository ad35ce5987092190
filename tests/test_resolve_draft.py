"""Is what `speculate` asks for done, or refused with a way out, and is its memory counted?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline import demo, resolve_draft
from ridgeline import resolve as resolve_module
from ridgeline.architectures import read_spec
from ridgeline.architectures.spec import ModelSpec
from ridgeline.config import Decision, EngineConfig, ResolvedConfig
from ridgeline.errors import ConfigError, DoesNotFit
from ridgeline.formats import AUTO_DRAFT_TOKENS
from ridgeline.kernels.cpu.native import library
from ridgeline.loader import read_config
from ridgeline.resolve import MemoryRow, resolve
from ridgeline.resolve_draft import known_draft
from tests.test_resolve import GB, LLAMA_8B, FakeDevice
from tests.tiny_model import tiny_config

CARD = FakeDevice("cuda:0", 140 * GB)
DRAFT_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
}
CHAT = demo.folder("chat")


def read_draft(model: str) -> ModelSpec:
    if model == "1b":
        return read_spec(DRAFT_1B)
    return read_spec(read_config(Path(demo.located(model))))


def done(
    config: dict[str, Any], device: FakeDevice = CARD, path: str = "m", **asked: Any
) -> tuple[ResolvedConfig, dict[str, int]]:
    """What was resolved, and the memory by line."""
    resolved, memory = resolve(
        EngineConfig(model="m", device=device.name, **asked),
        read_spec(config),
        device,
        model_path=path,
        model_name="m",
        revision=None,
        has_weights=True,
        read_draft=read_draft,
    )
    return resolved, _lines(memory)


def _lines(memory: tuple[MemoryRow, ...]) -> dict[str, int]:
    return {row.what: row.predicted for row in memory}


def decision(resolved: ResolvedConfig, name: str) -> Decision:
    (found,) = (d for d in resolved.decisions if d.field == name)
    return found


def chat() -> dict[str, Any]:
    return dict(read_config(CHAT))


def test_the_bundled_model_is_drafted_for_by_its_draft() -> None:
    resolved, memory = done(chat(), path=str(CHAT), dtype="bfloat16")
    assert (resolved.draft_method, resolved.draft_argument) == ("draft", "demo:draft")
    assert (resolved.max_draft_tokens, resolved.num_draft_tokens) == (
        AUTO_DRAFT_TOKENS["gpu"],
        None,
    )
    assert resolved.max_verified_tokens >= resolved.max_captured_rows
    assert decision(resolved, "speculate").got == "draft:demo:draft, up to 8 drafts"
    assert {"draft weights", "draft cache", "draft logits", "token rows"} <= set(memory)
    assert known_draft(str(CHAT)) == "demo:draft"
    assert known_draft(str(demo.folder("moe"))) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [({"enforce_eager": True}, "captured steps"), ({"deterministic": True}, "deterministic")],
)
def test_what_forbids_drafts_turns_them_off_where_nobody_asked(
    options: dict[str, Any], says: str
) -> None:
    resolved, memory = done(chat(), path=str(CHAT), dtype="bfloat16", **options)
    assert (resolved.draft_method, resolved.max_draft_tokens) == (None, 0)
    found = decision(resolved, "speculate")
    assert (found.asked, found.got) == ("auto", "off")
    assert says in found.because
    assert "token rows" not in memory


def test_any_other_model_has_none_until_asked() -> None:
    resolved, _ = done(LLAMA_8B)
    assert resolved.draft_method is None
    assert "ngram" in decision(resolved, "speculate").because
    off, _ = done(LLAMA_8B, speculate="off")
    assert all(d.field != "speculate" for d in off.decisions)


@pytest.mark.parametrize(
    ("asked", "method", "argument", "most", "fixed"),
    [
        ("ngram", "ngram", "", 8, None),
        ("ngram:3", "ngram", "", 3, 3),
        ("suffix:12", "suffix", "", 12, 12),
        ("early:4", "early", "4", 8, None),
        ("draft:1b:5", "draft", "1b", 5, 5),
        ("synthetic:0.6", "synthetic", "0.6", 8, None),
    ],
)
def test_what_is_asked_for(
    asked: str, method: str, argument: str, most: int, fixed: int | None
) -> None:
    resolved, memory = done(LLAMA_8B, speculate=asked)
    got = (
        resolved.draft_method,
        resolved.draft_argument,
        resolved.max_draft_tokens,
        resolved.num_draft_tokens,
    )
    assert got == (method, argument, most, fixed)
    assert memory["token rows"] > 0
    assert ("draft weights" in memory) == (method == "draft")
    assert resolved.max_in_flight == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculate": "drafts"}, "choose auto, off, ngram"),
        ({"speculate": "ngram:17"}, "1 .. 16"),
        ({"speculate": "early:32"}, "has 32 layers; draft with fewer"),
        ({"speculate": "ngram", "deterministic": True}, "deterministic.*or use speculate off"),
        ({"speculate": "ngram", "enforce_eager": True}, "enforce_eager rules out; leave it out"),
        ({"speculate": "ngram", "attention_backend": "reference"}, "attention_backend ref"),
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        done(LLAMA_8B, **options)


def test_without_native_kernels_a_cpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (resolve_module, resolve_draft):
        monkeypatch.setattr(module, "library", lambda: None)
    cpu = FakeDevice("cpu", 64 * GB)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(
            ConfigError, match=r"native kernels .* missing: .*, or use speculate off"
        ):
            done(tiny_config(), cpu, speculate="ngram", dtype=dtype)
    resolved, _ = done(chat(), cpu, path=str(CHAT), dtype="bfloat16")
    assert resolved.draft_method is None
    assert "native kernels" in decision(resolved, "speculate").because


@pytest.mark.skipif(library() is None, reason="needs the native library")
def test_a_cpu_drafts_in_recorded_steps_and_plans_one_step_at_a_time() -> None:
    cpu = FakeDevice("cpu", 64 * GB)
    with pytest.raises(ConfigError, match="float16"):
        done(tiny_config(), cpu, speculate="ngram", dtype="float16")
    for dtype in ("float32", "bfloat16"):  # the reason is the cache, in both
        with pytest.raises(ConfigError, match=r"read no fp8 KV cache; use kv_cache_dtype auto or"):
            done(tiny_config(), cpu, speculate="ngram", dtype=dtype, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="which attention_backend sdpa rules out"):
        done(tiny_config(), cpu, speculate="ngram", dtype="float32", attention_backend="sdpa")
    resolved, _ = done(tiny_config(), cpu, speculate="ngram", dtype="bfloat16")
    assert resolved.max_in_flight == 1
    assert "as it takes it" in decision(resolved, "max_in_flight").because


def test_a_draft_takes_its_room_from_the_cache() -> None:
    card = FakeDevice("cuda:0", 60 * GB)
    plain, before = done(LLAMA_8B, card)
    drafted, after = done(LLAMA_8B, card, speculate="draft:1b")
    assert drafted.num_blocks < plain.num_blocks
    assert after["draft weights"] == pytest.approx(3.0e9, rel=0.1)
    assert after["draft cache"] == pytest.approx(after["KV cache"] / 4, rel=0.01)  # 16 layers, half
    assert sum(after.values()) <= 0.9 * card.total
    assert sum(before.values()) <= 0.9 * card.total


def test_a_draft_that_does_not_fit_can_be_left_out() -> None:
    card = FakeDevice("cuda:0", 22 * GB)
    with pytest.raises(DoesNotFit) as refused:
        done(LLAMA_8B, card, speculate="draft:1b")
    assert {"speculate": "off"} in refused.value.settings
    assert any(what == "draft weights" for what, _ in refused.value.items)


def test_where_nobody_asked_a_draft_that_does_not_fit_is_left_out() -> None:
    spec, sizes = chat(), {"num_blocks": 64, "max_model_len": 512}
    small = FakeDevice("cuda:0", 10 * GB)
    with_draft, lines = done(spec, small, path=str(CHAT), dtype="bfloat16", **sizes)
    needed = sum(lines.values())
    assert with_draft.draft_method == "draft"
    tight = FakeDevice("cuda:0", 10 * GB, free=needed - 1000)
    resolved, _ = done(spec, tight, path=str(CHAT), dtype="bfloat16", **sizes)
    assert resolved.draft_method is None
    assert "does not fit" in decision(resolved, "speculate").because
