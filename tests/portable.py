"""Serve quantized checkpoints by the layout that rounds nothing, as if there were no other."""

from __future__ import annotations

import pytest

from ridgeline.quantization import integers
from ridgeline.quantization.weight_layouts import LAYOUTS


def only_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends; the table itself stays as it is, in its order."""
    monkeypatch.setattr(integers, "LAYOUTS", {"portable": LAYOUTS["portable"]})
