"""How do kernels in Triton read the formats of `paged_kv`?

Codes become numbers of the type of the queries as they are; scales and lows, which each token has,
come to scores and weights, which are fewer. Letters: R rows of queries, U keys of a tile, D head
size.
"""
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.paged_kv import PagedKV


def check_cache(kv: PagedKV) -> None:
    """What the kernels take for granted."""
    check(kv.k_NSKD.stride() == kv.v_NSKD.stride(), "K and V have the same strides")
    check(kv.k_NSKD.stride(3) == 1, "rows of D are contiguous")
    sets = kv.k_scales_NSK, kv.v_scales_NSK, kv.k_lows_NSK, kv.v_lows_NSK
    given = [x for x in sets if x is not None]
    check(len({x.stride() for x in given}) < 2, "scales and lows have the same strides")
    check(all(x.shape == kv.k_NSKD.shape[:3] for x in given), "a scale for each head of a token")


def scaling(kv: PagedKV) -> tuple[torch.Tensor, ...]:
    """Scales of keys and of values, lows of keys and of values; anything where there are none."""
    sets = kv.k_scales_NSK, kv.v_scales_NSK, kv.k_lows_NSK, kv.v_lows_NSK
    return tuple(kv.k_NSKD if x is None else x for x in sets)


def scaling_strides(kv: PagedKV) -> tuple[int, int, int]:
    """From block to block, slot to slot and head to head."""
    if kv.k_scales_NSK is None:
        return 0, 0, 0
    block, slot, head = kv.k_scales_NSK.stride()
    return block, slot, head


@triton.jit
def as_factor(q_RD, k):
    """q as products with this cache take it. e4m3 becomes float16 exactly and in one instruction
    for two numbers, bfloat16 through the slow unit for conversions; so q becomes float16 too.
    Codes do it in two instructions."""
    in_8: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8
    in_16: tl.constexpr = q_RD.dtype.primitive_bitwidth == 16
    return q_RD.to(tl.float16) if in_8 and in_16 else q_RD


@triton.jit
def signs(SIZE: tl.constexpr):
    """Sylvester's matrix [SIZE, SIZE], up to 256: 1 and -1 as float32."""
    i = tl.arange(0, SIZE)
    shared = i[:, None] & i[None, :]
    shared = shared ^ (shared >> 4)
    shared = shared ^ (shared >> 2)
    shared = shared ^ (shared >> 1)
    return (1 - 2 * (shared & 1)).to(tl.float32)


@triton.jit
def rotated(q_RD, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr):
    """`paged_kv.hadamard` of each row, rounded to its type."""
    sums_RD = tl.dot(q_RD, signs(HEAD_DIM).to(q_RD.dtype), input_precision=PRECISION)
    root: tl.constexpr = HEAD_DIM**-0.5
    return (sums_RD * root).to(q_RD.dtype)


@triton.jit
def place_of_code(dim_D, HEAD_DIM: tl.constexpr, CODES: tl.constexpr):
    """Where in a row of the cache number d of a head is: which place, and of 4 bits how far up."""
    if CODES == 4:
        return dim_D % (HEAD_DIM // 2), dim_D // (HEAD_DIM // 2) * 4
    else:
        return dim_D, dim_D * 0


@triton.jit
def numbers(code_UD, shift_D, like, CODES: tl.constexpr):
    """The type of `like` (float16 or float32 if CODES), exactly. CODES 8 or 4 bits, 0: as they
    are. Those of 4 bits less 8, so that what is rounded later is smaller; `low_of` has it back. A
    code in the low bits of a float16 of 1024 is 1024 and the code."""
    in_16: tl.constexpr = like.dtype.primitive_bitwidth == 16
    if CODES == 4:
        code_UD = (code_UD >> shift_D[None, :].to(tl.uint8)) & 15
        if in_16:
            bits = code_UD.to(tl.uint16) | 0x6400
            return bits.to(tl.float16, bitcast=True) - 1032.0
        return code_UD.to(like.dtype) - 8.0
    elif CODES == 8 and in_16:
        bits = (code_UD.to(tl.uint8, bitcast=True) ^ 128).to(tl.uint16) | 0x6400
        return bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        return code_UD.to(like.dtype)


@triton.jit
def low_of(low_U, scale_U):
    """What is added to codes of 4 bits as `numbers` gives them."""
    return low_U.to(tl.float32) + 8.0 * scale_U


@triton.jit
def level_of_scales(scale_U):
    """log2, as far as scales go: what weights are levelled by, so that scaled ones are 1 at most
    and lose nothing in 16 bits, however small values are."""
    return tl.log2(tl.maximum(scale_U, 2.0**-24))


@triton.jit
def nearest(x, LEAST: tl.constexpr, MOST: tl.constexpr):
    """The nearest whole numbers, of two the even one, within these bounds."""
    whole = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is added to it is rounded
    return tl.minimum(tl.maximum(whole, LEAST), MOST)


@triton.jit
def as_scale(x):
    """As float16 keeps it, in float32; NaN where that is not finite."""
    kept = x.to(tl.float16).to(tl.float32)
    return tl.where(tl.abs(kept) < float("inf"), kept, float("nan"))


@triton.jit
def steps(x, step):
    """How many of them; 0 of what is none."""
    return tl.div_rn(tl.where(step > 0, x, 0.0), tl.where(step > 0, step, 1.0))


@triton.jit
def encoded_8(first_HD, second_HD):
    """`paged_kv.encode_8` of heads in two halves: codes of both, scales."""
    largest_H = tl.maximum(tl.max(tl.abs(first_HD), 1), tl.max(tl.abs(second_HD), 1))
    broken_H = tl.sum((first_HD - first_HD) + (second_HD - second_HD), 1)  # NaN or 0
    scale_H = as_scale(largest_H / 127 + broken_H)
    step_H1 = scale_H[:, None]
    first_HD = nearest(steps(first_HD, step_H1), -127.0, 127.0)
    second_HD = nearest(steps(second_HD, step_H1), -127.0, 127.0)
    return first_HD.to(tl.int8), second_HD.to(tl.int8), scale_H


@triton.jit
def encoded_4(first_HD, second_HD):
    """`paged_kv.encode_4` of heads in two halves: bytes, scales, lows."""
    low_H = tl.minimum(tl.min(first_HD, 1), tl.min(second_HD, 1))
    high_H = tl.maximum(tl.max(first_HD, 1), tl.max(second_HD, 1))
    broken_H = tl.sum((first_HD - first_HD) + (second_HD - second_HD), 1)  # NaN or 0
    scale_H = as_scale((high_H - low_H) / 15 + broken_H)
    low_H = as_scale(low_H + broken_H)
    step_H1, low_H1 = scale_H[:, None], low_H[:, None]
    first_HD = nearest(steps(first_HD - low_H1, step_H1), 0.0, 15.0)
    second_HD = nearest(steps(second_HD - low_H1, step_H1), 0.0, 15.0)
    byte_HD = first_HD.to(tl.uint8) | (second_HD.to(tl.uint8) << 4)
    return byte_HD, scale_H, low_H


@triton.jit
def rotated_halves(first_HD, second_HD, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """`paged_kv.hadamard` of heads in two halves, float32. A matrix of twice the size is four of
    this one, the last with its sign turned."""
    sign_DD = signs(HALF)
    root: tl.constexpr = (2 * HALF) ** -0.5
    sum_HD = tl.dot(first_HD + second_HD, sign_DD, input_precision=PRECISION) * root
    apart_HD = tl.dot(first_HD - second_HD, sign_DD, input_precision=PRECISION) * root
    return sum_HD, apart_HD
