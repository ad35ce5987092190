"""`sample_rows` in Triton: six launches for as many rows at once as the scratch has room for.

1. adjust: bias, bans and penalties; the row's largest logit
2. bracket, twice, gather, select (threshold_triton): which scores top-k, top-p and min-p leave
3. draw: as `draw_rows`, of what is left; then the counts

Letters: R rows, V vocabulary, C chunks of a row.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import arrived_last, await_inputs, reset
from ridgeline.kernels.draw_rows_triton import MAX_IDS, minus_gumbel
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.sample_rows import Controls, Counts, SampleSpace
from ridgeline.kernels.threshold_triton import LIMIT, NUM, SOUND, find_thresholds, key_of

ENTRIES = 128  # looked at together

# The lines of `Controls`.
KEY, COUNTS, FIRST, END = tl.constexpr(0), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
TEMPERATURE, NOISY, LOG_MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3)
REPETITION, FREQUENCY, PRESENCE = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


def sample_rows_triton(
    logits_RV: torch.Tensor,
    positions_R: torch.Tensor,
    controls: Controls,
    counts: Counts,
    space: SampleSpace,
    *,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = logits_RV.shape
    check(0 < size <= MAX_IDS, "ids fit", size=size)
    check(size == space.adjusted_RV.shape[1], "scratch of this vocabulary", size=size)
    check(logits_RV.stride(1) == 1 or size == 1, "rows of logits are contiguous")
    check(controls.places_2N.is_contiguous(), "entries of rows are contiguous")
    check(counts.output_PV.is_contiguous() and counts.prompt_PV.is_contiguous(), "counts are too")
    pdl = launches_early(logits_RV.device) if pdl is None else pdl
    ids_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    is_sound_R = torch.empty(rows, dtype=torch.bool, device=logits_RV.device)
    for first in range(0, rows, space.num_rows):
        part = slice(first, min(first + space.num_rows, rows))
        some = controls.part(part)
        _adjust(logits_RV[part], positions_R[part], some, counts, space, pdl=pdl)
        find_thresholds(some, space, part.stop - part.start, pdl=pdl)
        _draw(positions_R[part], some, counts, space, ids_R[part], is_sound_R[part], pdl=pdl)
    return ids_R, is_sound_R


def _adjust(
    logits_RV: torch.Tensor,
    positions_R: torch.Tensor,
    controls: Controls,
    counts: Counts,
    space: SampleSpace,
    *,
    pdl: bool,
) -> None:
    rows, size = logits_RV.shape
    chunks = space.offsets_RC.shape[1]
    _adjust_rows[(rows, chunks)](
        logits_RV,
        positions_R,
        controls.whole_5R,
        controls.floats_7R,
        controls.places_2N,
        controls.values_N,
        counts.output_PV,
        counts.prompt_PV,
        space.adjusted_RV,
        space.most_R,
        space.state_5R,
        space.partial_R3C,
        space.arrivals_R,
        size,
        logits_RV.stride(0),
        controls.whole_5R.stride(0),
        controls.floats_7R.stride(0),
        controls.places_2N.stride(0),
        space.num_rows,
        chunks,
        BLOCK=space.chunk,
        CHUNKS=triton.next_power_of_2(chunks),
        ENTRIES=ENTRIES,
        PDL=pdl,
        num_warps=8,
        enable_fp_fusion=False,  # the sampler rounds after each operation
        launch_pdl=pdl,
    )


def _draw(
    positions_R: torch.Tensor, controls: Controls, counts: Counts, space: SampleSpace,
    ids_R: torch.Tensor, is_sound_R: torch.Tensor, *, pdl: bool,
) -> None:  # fmt: skip
    chunks = space.offsets_RC.shape[1]
    _draw_rows[(len(ids_R), chunks)](
        space.adjusted_RV, positions_R, controls.whole_5R, controls.floats_7R, counts.output_PV,
        space.most_R, space.state_5R, space.partial_R3C, ids_R, is_sound_R, space.arrivals_R,
        space.adjusted_RV.shape[1], controls.whole_5R.stride(0), controls.floats_7R.stride(0),
        space.num_rows, chunks, BLOCK=space.chunk, CHUNKS=triton.next_power_of_2(chunks), PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _penalised(x, count, is_prompt, repetition, frequency, presence):
    pushed = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
    x = tl.where((count > 0) | is_prompt, pushed, x)
    x = x - frequency * count.to(tl.float32)
    return x - presence * (count > 0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _adjust_rows(
    logits_ptr, positions_ptr, whole_ptr, floats_ptr, places_ptr, values_ptr, counts_ptr,
    prompt_ptr, adjusted_ptr, most_ptr, state_ptr, partial_ptr, arrivals_ptr, size, logits_stride,
    whole_stride, floats_stride, places_stride, num_rows, chunks, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_inputs(PDL)
    slot = tl.load(whole_ptr + COUNTS * whole_stride + row)
    first = tl.load(whole_ptr + FIRST * whole_stride + row).to(tl.int32)
    end = tl.load(whole_ptr + END * whole_stride + row).to(tl.int32)
    repetition = tl.load(floats_ptr + REPETITION * floats_stride + row)
    frequency = tl.load(floats_ptr + FREQUENCY * floats_stride + row)
    presence = tl.load(floats_ptr + PRESENCE * floats_stride + row)
    logits_row = logits_ptr + row * logits_stride
    adjusted_row = adjusted_ptr + row * size
    counts_row, prompt_row = counts_ptr + slot * size, prompt_ptr + slot * size
    v = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = v < size
    logits = tl.load(logits_row + v, inside, float("-inf")).to(tl.float32)
    if slot >= 0:
        count = tl.load(counts_row + v, inside, 0)
        is_prompt = tl.load(prompt_row + v, inside, 0) != 0
        logits = _penalised(logits, count, is_prompt, repetition, frequency, presence)
    tl.store(adjusted_row + v, logits, inside)
    if end > first:  # the few tokens with a bias or a ban, from the raw logit once more
        tl.debug_barrier()  # other threads have stored what is written over here
        position = tl.load(positions_ptr + row)
        for start in range(first, end, ENTRIES):
            at = start + tl.arange(0, ENTRIES)
            token = tl.load(places_ptr + at, at < end, -1)
            mine = (token >= chunk * BLOCK) & (token < (chunk + 1) * BLOCK)
            until = tl.load(places_ptr + places_stride + at, mine, 0)
            bias = tl.load(values_ptr + at, mine, 0.0)
            x = tl.load(logits_row + token, mine, 0.0).to(tl.float32)
            x = x + bias + tl.where(position < until, float("-inf"), 0.0)
            if slot >= 0:
                count = tl.load(counts_row + token, mine, 0)
                is_prompt = tl.load(prompt_row + token, mine, 0) != 0
                x = _penalised(x, count, is_prompt, repetition, frequency, presence)
            tl.store(adjusted_row + token, x, mine)
        tl.debug_barrier()
        logits = tl.load(adjusted_row + v, inside, float("-inf"))
    bad = tl.max((logits != logits).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(logits == logits, logits, float("-inf")), 0)
    places = partial_ptr + row * 3 * chunks
    tl.store(places + chunk, tl.where(bad, float("nan"), largest))
    if arrived_last(arrivals_ptr, row, chunks):
        c = tl.arange(0, CHUNKS)
        largest_C = tl.load(places + c, c < chunks, float("-inf"), cache_modifier=".cg")
        is_bad = tl.max((largest_C != largest_C).to(tl.int32), 0) > 0
        most = tl.max(tl.where(largest_C == largest_C, largest_C, float("-inf")), 0)
        is_sound = (tl.abs(most) < float("inf")) & (is_bad == 0)
        tl.store(most_ptr + row, tl.where(is_sound, most, 0.0))
        tl.store(state_ptr + SOUND * num_rows + row, is_sound.to(tl.int32))
        log_min_p = tl.load(floats_ptr + LOG_MIN_P * floats_stride + row)
        limit = tl.abs(log_min_p).to(tl.int32, bitcast=True)
        tl.store(state_ptr + LIMIT * num_rows + row, limit)
        tl.store(state_ptr + NUM * num_rows + row, 0)
        reset(arrivals_ptr, row)


@triton.jit(do_not_specialize=["num_rows"])
def _draw_rows(
    adjusted_ptr, positions_ptr, whole_ptr, floats_ptr, counts_ptr, most_ptr, state_ptr,
    partial_ptr, ids_ptr, is_sound_ptr, arrivals_ptr, size, whole_stride, floats_stride, num_rows,
    chunks, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_inputs(PDL)
    is_sound = tl.load(state_ptr + SOUND * num_rows + row) != 0
    limit = tl.load(state_ptr + LIMIT * num_rows + row)
    most = tl.load(most_ptr + row)
    temperature = tl.load(floats_ptr + TEMPERATURE * floats_stride + row)
    noisy = tl.load(floats_ptr + NOISY * floats_stride + row)
    v = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = v < size
    logits = tl.load(adjusted_ptr + row * size + v, inside, float("-inf"))
    logits = tl.where(logits == logits, logits, float("-inf"))
    kept = inside & (key_of(logits, most, temperature) <= limit)
    # From here on as `draw_rows`, number by number: a row that filters nothing gets the same token.
    largest = tl.max(logits, 0)
    level = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    score = (logits - level) / temperature
    if (noisy != 0.0) & (tl.max(kept.to(tl.int32), 0) > 0):
        key = tl.load(whole_ptr + KEY * whole_stride + row)
        position = tl.load(positions_ptr + row)
        score = score - minus_gumbel(key, position, v.to(tl.int64))
    score = tl.where(kept, score, float("-inf"))
    best = tl.max(score, 0)
    token = tl.min(tl.where(kept & (score == best), v, 1 << 24), 0)
    places = partial_ptr + row * 3 * chunks
    tl.store(places + chunk, largest)
    tl.store(places + chunks + chunk, best)
    tl.store(places + 2 * chunks + chunk, token.to(tl.float32))
    if arrived_last(arrivals_ptr, row, chunks):
        c = tl.arange(0, CHUNKS)
        given = c < chunks
        largest_C = tl.load(places + c, given, float("-inf"), cache_modifier=".cg")
        best_C = tl.load(places + chunks + c, given, float("-inf"), cache_modifier=".cg")
        token_C = tl.load(places + 2 * chunks + c, given, 0.0, cache_modifier=".cg")
        offset_C = (largest_C - most) / temperature
        score_C = tl.where(best_C > float("-inf"), best_C + offset_C, float("-inf"))
        winner = tl.max(score_C, 0)
        chosen = tl.min(tl.where(given & (score_C == winner), token_C, 16777216.0), 0)
        token_id = tl.where(is_sound, chosen, 0.0).to(tl.int64)  # the largest one is always kept
        tl.store(ids_ptr + row, token_id)
        tl.store(is_sound_ptr + row, is_sound)
        slot = tl.load(whole_ptr + COUNTS * whole_stride + row)
        if slot >= 0:
            place = counts_ptr + slot * size + token_id
            tl.store(place, tl.load(place) + 1)
        reset(arrivals_ptr, row)
