"""Every layer of a draft finds a table that keeps what it looks back on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.architectures import read_spec
from ridgeline.architectures.draft_groups import draft_groups
from ridgeline.architectures.kv_groups import KVGroup
from ridgeline.architectures.spec import ModelSpec
from ridgeline.errors import ConfigError
from tests.tiny_model import tiny_config

FULL, WIDE, NARROW = None, 64, 8


def layers_of(*windows: int | None) -> ModelSpec:
    spec = read_spec(tiny_config())
    first = spec.layers[0]
    layers = (replace(first, attention=replace(first.attention, window=w)) for w in windows)
    return replace(spec, layers=tuple(layers))


def tables_of(*windows: int | None) -> tuple[KVGroup, ...]:
    return tuple(KVGroup(window, (0,)) for window in windows)


CASES = {
    "alike": ((FULL,), (FULL, FULL), [(0, 1)]),
    "dealt out": (
        (FULL, FULL, NARROW),
        (FULL, FULL, FULL, NARROW, FULL),
        [(0, 2), (1, 4), (3,)],
    ),
    "not all tables": ((FULL, NARROW), (FULL,), [(0,), ()]),
    "a window in a table of all": ((FULL,), (NARROW, NARROW), [(0, 1)]),
    "a window in a wider one": ((FULL, WIDE), (FULL, NARROW), [(0,), (1,)]),
    "two windows in two tables": ((FULL, WIDE), (NARROW, WIDE), [(0,), (1,)]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_layer_has_a_table(name: str) -> None:
    target, draft, wanted = CASES[name]
    spec = layers_of(*draft)
    groups = draft_groups(tables_of(*target), spec)
    assert [group.layers for group in groups] == wanted
    for group, theirs in zip(groups, target, strict=True):
        for layer in group.layers:
            assert spec.layers[layer].attention.window == group.window
            assert theirs is None or (group.window is not None and group.window <= theirs)
        assert group.layers or group.window == theirs


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        ((NARROW,), (FULL,), "all tokens.* keeps 8 tokens"),
        ((NARROW,), (WIDE,), "the last 64 tokens"),
        ((FULL,), (FULL, NARROW), "the last 8 tokens"),
    ],
)
def test_a_table_that_is_not_there(
    target: tuple[int | None, ...], draft: tuple[int | None, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        draft_groups(tables_of(*target), layers_of(*draft))
