"""The pieces of which Triton kernels read caches of fewer bits, each by itself."""
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.paged_kv import hadamard

pytest.importorskip("triton")
import triton
import triton.language as tl

from ridgeline.kernels.paged_kv_triton import numbers, place_of_code, rotated, rotated_halves

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16]


@triton.jit
def _turn(x, out, ROWS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    place_RD = tl.arange(0, ROWS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + place_RD, rotated(tl.load(x + place_RD), SIZE, PRECISION))


@triton.jit
def _turn_halves(x, out, ROWS: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    place_RD = tl.arange(0, ROWS)[:, None] * 2 * HALF + tl.arange(0, HALF)[None, :]
    first, second = tl.load(x + place_RD), tl.load(x + place_RD + HALF)
    first, second = rotated_halves(first, second, HALF, PRECISION)
    tl.store(out + place_RD, first)
    tl.store(out + place_RD + HALF, second)


@triton.jit
def _scores(
    q,
    codes,
    out,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row_R, key_U, dim_D = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, SIZE)
    q_RD = tl.load(q + row_R[:, None] * SIZE + dim_D[None, :])
    code_D, shift_D = place_of_code(dim_D, SIZE, CODES)
    code_UD = tl.load(codes + key_U[:, None] * WIDTH + code_D[None, :])
    k_UD = numbers(code_UD, shift_D, q_RD, CODES)
    score_RU = tl.dot(q_RD, tl.trans(k_UD), input_precision=PRECISION)
    tl.store(out + row_R[:, None] * KEYS + key_U[None, :], score_RU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("rows", [16, 64])
def test_turned(rows: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(size)).to(dtype).to(DEVICE)
    out = torch.full_like(x, torch.nan)
    _turn[(1,)](x, out, rows, size, "ieee" if dtype == torch.float32 else "tf32")
    torch.testing.assert_close(out.float(), hadamard(x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_turned_halves(size: int) -> None:
    x = torch.randn(16, size, generator=torch.Generator().manual_seed(size)).to(DEVICE)
    out = torch.full_like(x, torch.nan)
    _turn_halves[(1,)](x, out, 16, size // 2, "ieee")
    torch.testing.assert_close(out, hadamard(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("codes", [8, 4])
def test_products_with_codes(codes: int, size: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(codes)
    q = torch.randn(16, size, generator=random).to(dtype)
    kept = torch.randint(0, 256, (32, size * codes // 8), generator=random, dtype=torch.uint8)
    kept[kept == 128] = 0
    k = kept.view(torch.int8).float()
    if codes == 4:
        k = torch.cat((kept & 15, kept >> 4), 1).float() - 8
    else:
        kept = kept.view(torch.int8)
    out = torch.full((16, 32), torch.nan, device=DEVICE)
    precision = "ieee" if dtype == torch.float32 else "tf32"
    _scores[(1,)](q.to(DEVICE), kept.to(DEVICE), out, 16, 32, size, kept.shape[1], codes, precision)
    torch.testing.assert_close(out.cpu(), q.float() @ k.T, rtol=1e-4, atol=1e-3)
