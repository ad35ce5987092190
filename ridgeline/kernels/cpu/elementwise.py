"""What stands between the products of a step on a CPU: norms, gates, rotations, draws, in C.

The meaning of each is that of the function of the same name in `kernels`, whose reference it is
tested against. Numbers are float32 or bfloat16; arithmetic is float32 and rounded once at the end.
Letters: T tokens, E hidden, F feed-forward width, X packed q, k and v, H query heads, K KV heads,
D head size, B rows of a step, N rows of the tables, R rows of logits, V vocabulary, g KV groups.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from ridgeline.errors import check
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.native import numbers, pointers
from ridgeline.kernels.cpu.recorder import Kernel, launch, pointer
from ridgeline.kernels.draw_rows import Draws
from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kernels.qk_norm_rope_write import HeadNorms
from ridgeline.kernels.step_inputs import StepInputs

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# Codes with scales, pairs of them with lows too, and numbers as they are.
KV_DTYPES = {**DTYPES, torch.int8: 2, torch.uint8: 3, torch.float8_e4m3fn: 4}
CODES = {8: torch.int8, 4: torch.uint8}  # by their bits
MAX_HEAD_DIM = 1024


class _Norm(ctypes.Structure):
    _fields_ = (
        *pointers("delta", "sum", "weight", "out"),
        *numbers("rows", "size", "delta_stride", "sum_stride", "out_stride", "dtype"),
        ("eps", ctypes.c_double),
    )


class _Gate(ctypes.Structure):
    _fields_ = (
        *pointers("gate_up", "out"),
        *numbers("rows", "size", "gate_up_stride", "out_stride", "dtype"),
    )


class _Rotate(ctypes.Structure):
    _fields_ = (
        *pointers("qkv", "table", "positions", "slots", "k", "v", "q_weight", "k_weight"),
        *pointers("k_scales", "v_scales", "k_lows", "v_lows"),
        *numbers("rows", "stride", "heads", "kv_heads", "head_dim"),
        *numbers("block_size", "block_stride", "slot_stride", "head_stride", "dtype"),
        *numbers("scale_block_stride", "scale_slot_stride", "scale_head_stride", "kv_dtype"),
        ("eps", ctypes.c_double),
    )


class Draw(ctypes.Structure):
    _fields_ = (
        *pointers("logits", "positions", "keys", "temperatures", "noisy", "ids", "is_sound"),
        *numbers("rows", "size", "stride", "dtype"),
    )


class _Inputs(ctypes.Structure):
    _fields_ = (
        *pointers("sent", "last_ids", "tables", "token_ids", "positions", "next_positions"),
        *pointers("seq_lens", "slots"),
        *numbers("rows", "groups", "sent_stride", "group_stride", "table_stride"),
        *numbers("slots_stride", "block_size"),
    )


class _Remember(ctypes.Structure):
    _fields_ = (*pointers("ids", "is_sound", "places", "last_ids", "out"), *numbers("rows"))


def runs_native(device: torch.device, dtype: torch.dtype) -> bool:
    """The kernels know numbers of this dtype, and the device is a CPU that they run on."""
    return device.type == "cpu" and dtype in DTYPES and native.library() is not None


def serves(x: torch.Tensor) -> bool:
    """The same of a tensor whose rows are contiguous."""
    return runs_native(x.device, x.dtype) and (x.stride(-1) == 1 or x.shape[-1] == 1)


@lru_cache(maxsize=32)
def kernel_of(name: str) -> Kernel:
    """A function of the library, which must be there."""
    library = native.library()
    check(library is not None, "the native library is there", kernel=name)
    function = getattr(library, name)
    function.restype, function.argtypes = ctypes.c_int, (ctypes.c_void_p,)
    found: Kernel = function
    return found


def _check_rows(what: str, *tensors: torch.Tensor) -> None:
    """Rows of contiguous numbers of one dtype, on the CPU."""
    first = tensors[0]
    for x in tensors:
        is_known = x.device.type == "cpu" and x.dtype in DTYPES and x.dtype == first.dtype
        check(is_known, "CPU tensors of one known dtype", kernel=what, dtype=x.dtype)
        check(x.stride(-1) == 1 or x.shape[-1] == 1, "contiguous rows", kernel=what)


def check_draws(what: str, rows: int, positions_R: torch.Tensor, draws: Draws | None) -> None:
    """One number for each row, side by side on the CPU, of the dtypes that `kernels.draw_rows`
    says."""
    lines = [("positions", positions_R, torch.int64)]
    if draws is not None:
        lines.append(("keys", draws.keys_R, torch.int64))
        lines.append(("temperatures", draws.temperatures_R, torch.float32))
        lines.append(("noisy", draws.noisy_R, torch.float32))
    for line, x, dtype in lines:
        is_known = x.device.type == "cpu" and x.dtype == dtype
        check(is_known, "a known dtype, on the CPU", kernel=what, line=line, dtype=x.dtype)
        check(x.shape == (rows,), "a number for each row", kernel=what, line=line, rows=rows)
        check(x.is_contiguous(), "contiguous lines", kernel=what, line=line)


def check_cache(kv: PagedKV, dtype: torch.dtype) -> None:
    """Keys and values that kernels for numbers of `dtype` know: the same, e4m3, or codes with
    scales."""
    known = (CODES[kv.code_bits],) if kv.code_bits else (dtype, torch.float8_e4m3fn)
    for x in (kv.k_NSKD, kv.v_NSKD):
        check(x.dtype in known, "numbers of the dtype, or codes with scales", dtype=x.dtype)
        check(x.stride(-1) == 1 or x.shape[-1] == 1, "contiguous heads")
    size = kv.head_dim
    check(kv.code_bits != 4 or (size >= 16 and size & (size - 1) == 0), "a power of two", size=size)
    given = kv.k_scales_NSK, kv.v_scales_NSK, kv.k_lows_NSK, kv.v_lows_NSK
    scales = [x for x in given if x is not None]
    check(len(scales) == {0: 0, 8: 2, 4: 4}[kv.code_bits], "scales of keys and of values")
    for scales_NSK in scales:
        check(scales_NSK.dtype == torch.float16, "scales of 16 bits", dtype=scales_NSK.dtype)
        check(scales_NSK.shape == kv.k_NSKD.shape[:-1], "a scale for each head of each token")
    check(kv.k_NSKD.stride() == kv.v_NSKD.stride(), "K and V lie alike")
    check(len({x.stride() for x in scales}) < 2, "their scales do too")


def scale_strides_of(kv: PagedKV) -> tuple[int, int, int]:
    """From block to block, slot to slot and head to head; 0 without scales."""
    if kv.k_scales_NSK is None:
        return 0, 0, 0
    block, slot, head = kv.k_scales_NSK.stride()
    return block, slot, head


def add_norm(
    delta_TE: torch.Tensor | None, sum_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """rms_norm(sum + delta), [T, E]; `sum_TE` becomes the sum. None adds nothing."""
    parts = (sum_TE, weight_E) if delta_TE is None else (sum_TE, weight_E, delta_TE)
    _check_rows("norm", *parts)
    rows, size = sum_TE.shape
    check(weight_E.shape == (size,), "a weight for each number", size=size)
    check(delta_TE is None or delta_TE.shape == sum_TE.shape, "what is added has the shape")
    out_TE = torch.empty((rows, size), dtype=sum_TE.dtype)
    arguments = _Norm(
        pointer(delta_TE), pointer(sum_TE), pointer(weight_E), pointer(out_TE),
        rows, size, 0 if delta_TE is None else delta_TE.stride(0), sum_TE.stride(0), size,
        DTYPES[sum_TE.dtype], eps,
    )  # fmt: skip
    launch(kernel_of("rl_norm"), arguments, *parts, out_TE)
    return out_TE


def silu_mul(gate_up_TG: torch.Tensor) -> torch.Tensor:
    """[T, 2 * F] (gate, then up) -> [T, F]"""
    _check_rows("gate", gate_up_TG)
    rows, width = gate_up_TG.shape
    check(width % 2 == 0, "gate and up", width=width)
    out_TF = torch.empty((rows, width // 2), dtype=gate_up_TG.dtype)
    arguments = _Gate(
        pointer(gate_up_TG), pointer(out_TF),
        rows, width // 2, gate_up_TG.stride(0), width // 2, DTYPES[gate_up_TG.dtype],
    )  # fmt: skip
    launch(kernel_of("rl_gate"), arguments, gate_up_TG, out_TF)
    return out_TF


def rotate_and_write(
    qkv_TX: torch.Tensor,
    table_L2D: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv: PagedKV,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """`qk_norm_rope_write` in place: queries [T, H, D] are a view of `qkv_TX`, whose keys are not
    turned afterwards."""
    _, block_size, kv_heads, _ = kv.k_NSKD.shape
    size = kv.head_dim
    rows, width = qkv_TX.shape
    heads = width // size - 2 * kv_heads
    _check_rows("turn", qkv_TX)
    check_cache(kv, qkv_TX.dtype)
    check(size <= MAX_HEAD_DIM and size % 2 == 0, "a head size that is served", size=size)
    check(table_L2D.dtype == torch.float32 and table_L2D.is_contiguous(), "a table of float32")
    for whole in (positions_T, slots_T):
        check(whole.dtype == torch.int64 and whole.stride(0) == 1, "whole numbers of 64 bits")
    strides = kv.k_NSKD.stride()
    q_weight = k_weight = None
    if norms is not None:
        q_weight, k_weight = norms.q_weight_D, norms.k_weight_D
        _check_rows("turn", qkv_TX, q_weight, k_weight)
    arguments = _Rotate(
        pointer(qkv_TX), pointer(table_L2D), pointer(positions_T), pointer(slots_T),
        pointer(kv.k_NSKD), pointer(kv.v_NSKD), pointer(q_weight), pointer(k_weight),
        pointer(kv.k_scales_NSK), pointer(kv.v_scales_NSK), pointer(kv.k_lows_NSK),
        pointer(kv.v_lows_NSK), rows, qkv_TX.stride(0), heads, kv_heads, size, block_size,
        strides[0], strides[1], strides[2], DTYPES[qkv_TX.dtype],
        *scale_strides_of(kv), KV_DTYPES[kv.k_NSKD.dtype], 0.0 if norms is None else norms.eps,
    )  # fmt: skip
    kept = table_L2D, positions_T, slots_T, kv, q_weight, k_weight
    launch(kernel_of("rl_rotate"), arguments, qkv_TX, *kept)
    return qkv_TX.as_strided((rows, heads, size), (qkv_TX.stride(0), size, 1))


def draw_rows(
    logits_RV: torch.Tensor, positions_R: torch.Tensor, draws: Draws | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, int64; is sound, bool), as `kernels.draw_rows`."""
    _check_rows("draw", logits_RV)
    rows, size = logits_RV.shape
    check(0 < size < 1 << 31, "ids fit", size=size)
    check_draws("draw", rows, positions_R, draws)
    ids_R = torch.empty(rows, dtype=torch.int64)
    is_sound_R = torch.empty(rows, dtype=torch.bool)
    keys = temperatures = noisy = None
    if draws is not None:
        keys, temperatures, noisy = draws.keys_R, draws.temperatures_R, draws.noisy_R
    arguments = Draw(
        pointer(logits_RV), pointer(positions_R), pointer(keys), pointer(temperatures),
        pointer(noisy), pointer(ids_R), pointer(is_sound_R),
        rows, size, logits_RV.stride(0), DTYPES[logits_RV.dtype],
    )  # fmt: skip
    kept = positions_R, keys, temperatures, noisy, ids_R, is_sound_R
    launch(kernel_of("rl_draw"), arguments, logits_RV, *kept)
    return ids_R, is_sound_R


def step_inputs(
    sent_XB: torch.Tensor,
    last_ids_N: torch.Tensor,
    tables_gNM: torch.Tensor,
    out: StepInputs,
    block_size: int,
) -> None:
    """As `kernels.step_inputs`."""
    groups, rows = tables_gNM.shape[0], sent_XB.shape[1]
    check(sent_XB.shape[0] == 2 + groups and sent_XB.stride(1) == 1, "a line for each group")
    arguments = _Inputs(
        pointer(sent_XB), pointer(last_ids_N), pointer(tables_gNM), pointer(out.token_ids_B),
        pointer(out.positions_B), pointer(out.next_positions_B), pointer(out.seq_lens_B),
        pointer(out.slots_gB), rows, groups, sent_XB.stride(0), tables_gNM.stride(0),
        tables_gNM.stride(1), out.slots_gB.stride(0), block_size,
    )  # fmt: skip
    launch(kernel_of("rl_inputs"), arguments, sent_XB, last_ids_N, tables_gNM, out)


def remember(
    ids_B: torch.Tensor,
    is_sound_B: torch.Tensor,
    places_B: torch.Tensor,
    last_ids_N: torch.Tensor,
    out_B: torch.Tensor,
) -> None:
    """`last_ids_N` at the places becomes the ids; `out_B` the ids, -1 where they are not sound."""
    arguments = _Remember(
        pointer(ids_B), pointer(is_sound_B), pointer(places_B), pointer(last_ids_N),
        pointer(out_B), len(ids_B),
    )  # fmt: skip
    launch(kernel_of("rl_remember"), arguments, ids_B, is_sound_B, places_B, last_ids_N, out_B)
