"""By which block tables of a model does its draft find keys and values? By the model's own.

A draft's tokens are those of its target, so each block of the target's tables has room for the
draft's keys and values too: one pool, one table, one prefix cache. A layer of the draft needs a
table that keeps as much of the past as it looks back on.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.architectures.kv_groups import KVGroup
from ridgeline.architectures.spec import ModelSpec
from ridgeline.errors import ConfigError


def draft_groups(target: Sequence[KVGroup], draft: ModelSpec) -> tuple[KVGroup, ...]:
    """One group for each of the target's, in its order, some without layers. Layers of one window
    are dealt out evenly over the tables of that window; a window that the target has not takes a
    table that keeps more. ConfigError if there is none."""
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(draft.layers):
        if layer.attention.cache_layer is None:
            by_window.setdefault(layer.attention.window, []).append(index)
    places_of = {w: [i for i, group in enumerate(target) if group.window == w] for w in by_window}
    taken = {i for places in places_of.values() for i in places}
    for window in sorted(filter(None, by_window), reverse=True):
        if not places_of[window]:
            wider = (i for i, g in enumerate(target) if i not in taken and _keeps(g, window))
            places_of[window] = [i for _, i in zip(range(1), wider, strict=False)]
            taken.update(places_of[window])
    groups = [KVGroup(group.window, ()) for group in target]
    for kind, layers in by_window.items():
        places = places_of[kind]
        if not places:
            raise ConfigError(_no_table(target, kind))
        for at, place in enumerate(places):
            groups[place] = KVGroup(kind, tuple(layers[at :: len(places)]))
    return tuple(groups)


def _keeps(group: KVGroup, window: int) -> bool:
    return group.window is None or group.window >= window


def _no_table(target: Sequence[KVGroup], window: int | None) -> str:
    kept = ", ".join(
        dict.fromkeys("all tokens" if g.window is None else f"{g.window} tokens" for g in target)
    )
    wanted = "all tokens" if window is None else f"the last {window} tokens"
    return (
        f"the draft has layers that look back on {wanted}, and the model has no block tables left "
        f"for them (it keeps {kept}); choose a draft of the model's own family, or drafts by "
        "ngram or suffix"
    )
