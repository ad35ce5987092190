"""What Triton's interpreter needs to go with the numpy of these tests."""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

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


@pytest.fixture(autouse=True)
def _products_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores add up each number of a product in the same order, wherever it stands in a tile.
    The library behind numpy does so on some CPUs only."""
    if not INTERPRETED:
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        wide = [_numbers(interpreter, x).astype(d.data.dtype) for x in (a, b)]
        product = np.einsum("...ik,...kj->...ij", *wide)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(builder, "create_dot", create_dot)


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Float32 products on a GPU are not rounded to TF32; monkeypatch does not find this setting."""
    setting = torch.backends.cuda.matmul
    before, setting.allow_tf32 = setting.allow_tf32, False
    yield
    setting.allow_tf32 = before


def _numbers(interpreter: Any, handle: Any) -> Any:
    """Those of 8 bits are kept as codes."""
    dtype = handle.dtype
    if dtype.primitive_bitwidth != 8 or not dtype.is_floating():
        return handle.data
    half = interpreter.tl.float16
    return interpreter._convert_float(handle.data, dtype, half, None).view(np.float16)
