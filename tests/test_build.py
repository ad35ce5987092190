"""Is an engine that drafts put together from what was asked for?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline import build as building
from ridgeline.build import build
from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.errors import ConfigError
from ridgeline.resolve import resolve
from tests.captures import captures
from tests.conftest import TEST_DEVICE
from tests.tiny_model import make_tiny_model

pytestmark = captures


class Foreseeing:
    """Stands for `WarmUp`, and notes which numbers of drafts it is told of."""

    told: Sequence[int] = ()

    def __init__(self, executor: Any, *, draft_tokens: Sequence[int], **bounds: int | None) -> None:
        Foreseeing.told = draft_tokens

    def run(self, seconds: float) -> None:
        """There is nothing to do."""

    def text(self) -> str:
        return "nothing"


@pytest.mark.parametrize(
    ("speculate", "draft_tokens"),
    [
        ("draft:demo:draft:3", (3, 2, 1)),
        ("draft:demo:draft", (4, 2, 1, 3, 6) if TEST_DEVICE == "cpu" else (4, 2, 1, 3, 6, 8)),
        ("ngram:6", (6, 4, 3, 2, 1)),
        ("off", ()),
    ],
)
def test_what_may_be_chosen_is_warmed_up(
    speculate: str, draft_tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm(*args: Any, **options: Any) -> tuple[ResolvedConfig, Any]:
        resolved, memory = resolve(*args, **options)
        return replace(resolved, warm_up=True), memory

    monkeypatch.setattr(building, "resolve", warm)
    monkeypatch.setattr(building, "WarmUp", Foreseeing)
    build(EngineConfig(model="demo:chat", device=TEST_DEVICE, speculate=speculate, num_blocks=64))
    assert Foreseeing.told == draft_tokens


def test_the_memory_of_a_draft_is_as_announced() -> None:
    built = build(
        EngineConfig(
            model="demo:chat", device=TEST_DEVICE, speculate="draft:demo:draft:3", num_blocks=64
        )
    )
    rows = {row.what: row for row in built.memory}
    for what in ("weights", "KV cache", "draft weights", "draft cache"):
        assert rows[what].measured == rows[what].predicted > 0


def test_a_draft_whose_positions_are_scaled_reaches_as_far(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", head_dim=16)
    short: dict[str, Any] = {"max_position_embeddings": 128, "head_dim": 16}
    scaled: dict[str, Any] = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    reaches = make_tiny_model(tmp_path / "reaches", **short, **scaled)
    ends = make_tiny_model(tmp_path / "ends", **short)

    def speculating(draft: Path) -> EngineConfig:
        return EngineConfig(
            model=str(model), device=TEST_DEVICE, speculate=f"draft:{draft}:2", num_blocks=64
        )

    build(speculating(reaches))
    with pytest.raises(ConfigError, match="reads 128 tokens at most and max_model_len is 512"):
        build(speculating(ends))
