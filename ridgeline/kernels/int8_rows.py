"""Rows of a matrix of int8, looked up by number: an embedding of 8 bits.

Letters: T tokens, N rows of W, K their width.
"""

from __future__ import annotations

import torch


def int8_rows(
    codes_NK: torch.Tensor, scale_N: torch.Tensor, rows_T: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[T, K]: code * scale in float32, rounded once. Numbers of rows are integers below N."""
    if codes_NK.device.type == "cuda":
        from ridgeline.kernels.int8_rows_triton import int8_rows_triton

        return int8_rows_triton(codes_NK, scale_N, rows_T, dtype)
    return int8_rows_reference(codes_NK, scale_N, rows_T, dtype)


def int8_rows_reference(
    codes_NK: torch.Tensor, scale_N: torch.Tensor, rows_T: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    codes_TK = codes_NK.index_select(0, rows_T).float()
    return codes_TK.mul_(scale_N.index_select(0, rows_T).float()[:, None]).to(dtype)
