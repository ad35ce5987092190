"""Drafts need captured steps: on a CPU recorded calls of native kernels, which a machine without a
C++ compiler has not."""

from __future__ import annotations

import pytest

from ridgeline.kernels.cpu import native
from tests.conftest import TEST_DEVICE

captures = pytest.mark.skipif(
    TEST_DEVICE == "cpu" and native.library() is None, reason="no native CPU kernels here"
)
records = pytest.mark.skipif(  # of tests that ask for a CPU whatever they are run on
    native.library() is None, reason="no native CPU kernels here"
)
