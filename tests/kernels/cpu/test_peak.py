"""Is there a ceiling of products wherever the linear layers use dot products?"""

from __future__ import annotations

import pytest

from bench.cpu.kernels import peak
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.packed_linear import Codes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
LEVELS = native.LEVELS[1 : native.LEVELS.index(native.best_level()) + 1]


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_with_dot_products_has_one(level: str) -> None:
    with native.at_level(level):
        found = {kind: peak(kind, 1, 2) for kind in (Codes.BF16, Codes.INT8)}
    if level == "avx2":
        assert found == {Codes.BF16: None, Codes.INT8: None}
    else:
        assert all(rate is not None and rate > 0 for rate in found.values()), found
