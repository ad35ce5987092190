"""Which public models are known by name, without their weights?

The data are in `catalogue.json`: of each model the hub id, the month in which it was published,
and of its config.json the keys that say its sizes and positions. Defaults of the family that a
file leaves out are written out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType

DATA = Path(__file__).parent / "catalogue.json"
MAX_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """A public model. `date` is year and month."""

    name: str
    hub_id: str
    date: str
    config: Mapping[str, object] = field(hash=False)

    @property
    def source(self) -> str:
        return f"config.json of {self.hub_id}, {self.date}"


@cache
def catalogue() -> Mapping[str, Entry]:
    """All of them, by name, in the order of the file: by family."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    return MappingProxyType({name: Entry(name, **values) for name, values in data.items()})


def find_entry(name: str) -> Entry | None:
    """The model of this name, in any case; None when there is none."""
    return catalogue().get(name.lower())


def suggestions(model: str) -> list[str]:
    """Names of the catalogue that are near to what was typed, a hub id or a name; the nearest
    first."""
    typed = model.lower().partition("@")[0]
    owned = [name for name, entry in catalogue().items() if entry.hub_id.lower() == typed]
    tail = typed.rpartition("/")[2]
    longer = [name for name in catalogue() if tail.startswith(f"{name}-") or tail == name]
    close = get_close_matches(tail, catalogue(), n=MAX_SUGGESTIONS, cutoff=0.75)
    return list(dict.fromkeys(owned + longer + close))[:MAX_SUGGESTIONS]
