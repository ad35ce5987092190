"""Without a GPU, Triton kernels run in Triton's interpreter. It must be asked for before the first
import of triton, so here, where modules are collected."""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 turns loop bounds into integers in a way that numpy 2.4 refuses."""
    if not INTERPRETED:
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
