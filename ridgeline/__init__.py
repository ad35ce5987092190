"""Ridgeline: an LLM inference engine that knows its own limit.

Names resolve on first use, so that importing a pure part never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ridgeline.errors import ConfigError, EngineFault, RequestFault, RidgelineError
    from ridgeline.llm import LLM
    from ridgeline.request import SamplingParams

_WHERE = {
    "LLM": "ridgeline.llm",
    "SamplingParams": "ridgeline.request",
    "RidgelineError": "ridgeline.errors",
    "ConfigError": "ridgeline.errors",
    "RequestFault": "ridgeline.errors",
    "EngineFault": "ridgeline.errors",
}

__all__ = [
    "LLM",
    "ConfigError",
    "EngineFault",
    "RequestFault",
    "RidgelineError",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
