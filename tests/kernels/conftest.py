"""What Triton's interpreter needs to go with the numpy of these tests."""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels import INTERPRETED


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
