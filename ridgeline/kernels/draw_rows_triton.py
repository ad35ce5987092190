"""`draw_rows` in Triton: a program takes some chunks of a row; the last of a row merges its chunks.

Scores are taken relative to the largest logit of their chunk, so that no temperature is too low.
A maximum with a rule for equals does not depend on the order. Letters: R rows, V vocabulary.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import arrived_last, await_inputs, reset
from ridgeline.kernels.draw_rows import Draws
from ridgeline.kernels.launching import Workspace, launches_early, make_workspace

BLOCK = 4096
GREEDY_BLOCK, GREEDY_SPAN = 1024, 8  # ids, blocks
PROGRAMS = 2048  # of random rows; where there are more chunks, a program takes several
MAX_IDS = 1 << 24  # ids travel through the workspace as float32

# The constants of `kernels.noise`, as signed numbers.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
TOKEN_STEP = tl.constexpr(0xD1342543DE82EF95 - (1 << 64))
TWO_POW_MINUS_32 = tl.constexpr(2.0**-32)
BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
LOG_2 = tl.constexpr(0.6931471805599453)
# -log(1 - u) / u up to 1/4.
C1 = tl.constexpr(0.5000072717666626)
C2 = tl.constexpr(0.33293071389198303)
C3 = tl.constexpr(0.25711020827293396)
C4 = tl.constexpr(0.1467033326625824)
C5 = tl.constexpr(0.3357096314430237)
IS_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


def draw_rows_triton(
    logits_RV: torch.Tensor, positions_R: torch.Tensor, draws: Draws | None, *,
    workspace: Workspace | None = None, block: int | None = None, span: int | None = None,
    rounds: int | None = None, pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A chunk is `span` blocks of `block` ids; `rounds` are taken by a program of a random row."""
    rows, size = logits_RV.shape
    check(0 < size <= MAX_IDS, "ids fit", size=size)
    check(logits_RV.stride(1) == 1 or size == 1, "rows of logits are contiguous")
    ids_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    is_sound_R = torch.empty(rows, dtype=torch.bool, device=logits_RV.device)
    if rows == 0:
        return ids_R, is_sound_R
    pdl = launches_early(logits_RV.device) if pdl is None else pdl
    usual = (GREEDY_BLOCK, GREEDY_SPAN) if draws is None else (BLOCK, 1)
    block, span = block or usual[0], span or usual[1]
    chunks = triton.cdiv(size, block * span)
    rounds = rounds or triton.cdiv(chunks, max(1, PROGRAMS // rows))
    programs = chunks if draws is None else triton.cdiv(chunks, rounds)
    room = workspace or make_workspace(logits_RV.device, 3 * rows * chunks, rows)
    room.check_room(3 * rows * chunks, rows)
    _draw_rows[(rows, programs)](
        logits_RV, positions_R, draws.keys_R if draws else positions_R,
        draws.temperatures_R if draws else logits_RV, draws.noisy_R if draws else logits_RV, ids_R,
        is_sound_R, room.partial_P, room.arrivals_A, size, logits_RV.stride(0), chunks, rounds,
        BLOCK=block, SPAN=span, CHUNKS=triton.next_power_of_2(chunks), RANDOM=draws is not None,
        PDL=pdl, num_warps=max(1, min(8, block // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return ids_R, is_sound_R


@triton.jit
def uniform(key, position, token):
    z = key + position * GOLDEN + (token + 1) * TOKEN_STEP
    u = z.to(tl.uint64, bitcast=True)
    u = (u ^ (u >> 30)).to(tl.int64, bitcast=True) * MIX_1
    u = u.to(tl.uint64, bitcast=True)
    u = (u ^ (u >> 27)).to(tl.int64, bitcast=True) * MIX_2
    high = (u.to(tl.uint64, bitcast=True) >> 32).to(tl.float32)
    return tl.minimum((high + 0.5) * TWO_POW_MINUS_32, BELOW_ONE)


@triton.jit
def minus_gumbel(key, position, token):
    return _log(minus_log_of_rest(uniform(key, position, token)))


@triton.jit
def minus_log_of_rest(u):
    """-log(1 - u), with the relative precision of u where it is small: up to 1/4 by a polynomial
    (least greatest error, 4e-8)."""
    series = C5
    series = series * u + C4
    series = series * u + C3
    series = series * u + C2
    series = series * u + C1
    series = series * u + 1.0
    return tl.where(u < 0.25, series * u, -_log(1.0 - u))


@triton.jit
def _log(x):
    """By the device's own instruction: its base 2 is 2e-7 off, or by that part of itself."""
    if IS_COMPILED:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log2 = tl.log2(x)
    return log2 * LOG_2


@triton.jit(do_not_specialize=["rounds"])
def _draw_rows(
    logits_ptr, positions_ptr, keys_ptr, temperatures_ptr, noisy_ptr, ids_ptr, is_sound_ptr,
    partial_ptr, arrivals_ptr, size, stride, chunks, rounds, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, CHUNKS: tl.constexpr, RANDOM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each chunk leaves its largest logit, best score and token for the merge: how scores are
    rounded does not depend on how many chunks a program takes, hence not on the batch."""
    row = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    await_inputs(PDL)
    places = partial_ptr + row * 3 * chunks
    temperature = 1.0
    if RANDOM:
        temperature = tl.load(temperatures_ptr + row)
        noisy = tl.load(noisy_ptr + row)
        key = tl.load(keys_ptr + row)
        position = tl.load(positions_ptr + row)
        for chunk in range(program * rounds, tl.minimum((program + 1) * rounds, chunks)):
            v = chunk * BLOCK + tl.arange(0, BLOCK)
            inside = v < size
            logits = tl.load(logits_ptr + row * stride + v, inside, float("-inf")).to(tl.float32)
            bad = tl.max((logits != logits).to(tl.int32), 0) > 0
            logits = tl.where(logits == logits, logits, float("-inf"))
            largest = tl.max(logits, 0)
            level = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
            score = (logits - level) / temperature
            if noisy != 0.0:
                score = score - minus_gumbel(key, position, v.to(tl.int64))
            best = tl.max(score, 0)
            token = tl.min(tl.where(inside & (score == best), v, 1 << 24), 0)
            tl.store(places + chunk, tl.where(bad, float("nan"), largest))
            tl.store(places + chunks + chunk, best)
            tl.store(places + 2 * chunks + chunk, token.to(tl.float32))
    else:
        # From the end: what the product wrote last is still in the L2 cache.
        program = tl.num_programs(1) - 1 - program
        # What each place of a block has found stays there, until all blocks have been seen.
        first = program * SPAN * BLOCK + tl.arange(0, BLOCK)
        found = tl.full((BLOCK,), float("-inf"), tl.float32)
        found_at = first
        has_bad = tl.zeros((BLOCK,), tl.int32)
        for i in tl.static_range(SPAN):
            v = first + i * BLOCK
            logits = tl.load(logits_ptr + row * stride + v, v < size, float("-inf"))
            logits = logits.to(tl.float32)
            has_bad |= (logits != logits).to(tl.int32)
            is_more = logits > found
            found_at = tl.where(is_more, v, found_at)
            found = tl.where(is_more, logits, found)
        bad = tl.max(has_bad, 0) > 0
        largest = tl.max(found, 0)
        best = tl.where(tl.abs(largest) < float("inf"), 0.0, largest)
        token = tl.min(tl.where(found == largest, found_at, 1 << 24), 0)
        tl.store(places + program, tl.where(bad, float("nan"), largest))
        tl.store(places + chunks + program, best)
        tl.store(places + 2 * chunks + program, token.to(tl.float32))
    if arrived_last(arrivals_ptr, row, tl.num_programs(1)):
        c = tl.arange(0, CHUNKS)
        given = c < chunks
        largest_C = tl.load(places + c, given, float("-inf"), cache_modifier=".cg")
        best_C = tl.load(places + chunks + c, given, float("-inf"), cache_modifier=".cg")
        token_C = tl.load(places + 2 * chunks + c, given, 0.0, cache_modifier=".cg")
        is_bad = tl.max((largest_C != largest_C).to(tl.int32), 0) > 0
        largest_C = tl.where(largest_C == largest_C, largest_C, float("-inf"))
        most = tl.max(largest_C, 0)
        is_sound = (tl.abs(most) < float("inf")) & (is_bad == 0)
        offset_C = (largest_C - tl.where(is_sound, most, 0.0)) / temperature
        score_C = tl.where(largest_C > float("-inf"), best_C + offset_C, float("-inf"))
        winner = tl.max(score_C, 0)
        chosen = tl.min(tl.where(given & (score_C == winner), token_C, 16777216.0), 0)
        tl.store(ids_ptr + row, tl.where(is_sound, chosen, 0.0).to(tl.int64))
        tl.store(is_sound_ptr + row, is_sound)
        reset(arrivals_ptr, row)
