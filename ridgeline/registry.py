"""Where does the thing of this name live? Tables of "module:Class", loaded on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ridgeline.errors import ConfigError


def load(table: Mapping[str, str], name: str, what: str) -> Any:
    """The object that `table` names, imported now. ConfigError lists the choices."""
    if name not in table:
        raise ConfigError(f"unknown {what} {name!r}; choose one of {', '.join(sorted(table))}")
    return opened(table[name])


def opened(where: str) -> Any:
    """What a "module:name" means, imported now."""
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)
