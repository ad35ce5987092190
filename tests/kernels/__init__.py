"""Without a GPU, Triton kernels run in Triton's interpreter. It must be asked for before triton is
first imported, so here, before any module of this folder, wherever it is imported from."""

from __future__ import annotations

import os

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")
