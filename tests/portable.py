"""Serve quantized checkpoints by the home that rounds nothing, as if there were no other."""

from __future__ import annotations

import pytest

from ridgeline.quantization import stored
from ridgeline.quantization.homes import HOMES


def only_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends; the table itself stays as it is, in its order."""
    monkeypatch.setattr(stored, "HOMES", {"portable": HOMES["portable"]})
