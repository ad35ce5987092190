"""The HTTP server: an OpenAI-compatible API over an engine in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.server.config import Limits, ServeConfig

if TYPE_CHECKING:
    from ridgeline.server.lifecycle import serve

__all__ = ["Limits", "ServeConfig", "serve"]


def __getattr__(name: str) -> object:
    if name == "serve":  # on first use, so that the engine process never loads the HTTP side
        from ridgeline.server import lifecycle

        return lifecycle.serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
