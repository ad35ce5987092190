"""Which scores do top-k, top-p and min-p leave? Four launches, after `adjust` of sample_rows.

1. bracket: how much lies above each of a few distances, and so between which two the threshold is;
   a program a chunk of a row, the last of a row decides
2. bracket again, finer, for rows with very many candidates between the two
3. gather: the keys inside that bracket, side by side
4. select: the exact threshold, by bisection over those (or the whole row, if they were too many)

With top-k and top-p both, the k best are found first and top-p weighs them alone. Rows without
either cost no more than the launches. All sums are in a fixed order, those of probabilities in
float64. Letters: R rows, V vocabulary, C chunks of a row, J levels.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.arrival_triton import arrived_last, await_inputs, reset
from ridgeline.kernels.sample_rows import LEVELS, Controls, SampleSpace

# Lines of `state_5R`: the row may be drawn from; the largest key that is kept; the bracket: a
# threshold is at least `low` and below `high`; how many keys are listed, 0: there is nothing to
# find, -1: too many.
SOUND, LIMIT, NUM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(4)
LOW, HIGH = tl.constexpr(2), tl.constexpr(3)
# Lines of `aims_2R`: what lies above the bracket weighs, and must with some of it weigh to be over.
BASE, TARGET = tl.constexpr(0), tl.constexpr(1)
# Lines of `Controls`.
TOP_K = tl.constexpr(1)
TEMPERATURE, TOP_P = tl.constexpr(0), tl.constexpr(2)


def find_thresholds(controls: Controls, space: SampleSpace, num_rows: int, *, pdl: bool) -> None:
    """The line LIMIT of the state, for the first `num_rows` rows of the scratch."""
    size, chunks = space.adjusted_RV.shape[1], space.offsets_RC.shape[1]
    scores = (
        controls.whole_5R,
        controls.floats_7R,
        space.adjusted_RV,
        space.most_R,
        space.state_5R,
        space.aims_2R,
    )
    sizes = (
        size,
        controls.whole_5R.stride(0),
        controls.floats_7R.stride(0),
        space.num_rows,
    )
    listed = space.listed_RL.shape[1]
    for is_finer in (False, True):
        _bracket_rows[(num_rows, chunks)](
            *scores, space.pivots_J, space.counts_RCJ, space.masses_RCJ, space.offsets_RC,
            space.arrivals_R, *sizes, chunks, listed, BLOCK=space.chunk,
            CHUNKS=triton.next_power_of_2(chunks), LEVELS=LEVELS, FINER=is_finer, PDL=pdl,
            num_warps=8, launch_pdl=pdl,
        )  # fmt: skip
    _gather_rows[(num_rows, chunks)](
        *scores, space.offsets_RC, space.listed_RL, *sizes, chunks, listed, BLOCK=space.chunk,
        PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    _select_rows[(num_rows,)](
        *scores, space.listed_RL, *sizes, listed, BLOCK=space.chunk, PDL=pdl, num_warps=8,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def key_of(logits, most, temperature):
    """The bits of how far the score is below the largest: rounded as the sampler rounds it."""
    return tl.abs(tl.div_rn(logits - most, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def _mass_of(key):
    """The probability of a score, the largest one's being 1."""
    return tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def _finer(low, high, part):
    """`part` of the way from `low` to `high`, by distance; by bits if there is no end of it."""
    near, far = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    by_distance = tl.minimum(near + (far - near) * part, far).to(tl.int32, bitcast=True)
    by_bits = low + ((high - low).to(tl.float32) * part).to(tl.int32)
    pivot = tl.where(high < 0x7F800000, by_distance, by_bits)
    return tl.where(part < 1.0, pivot, high)


@triton.jit(do_not_specialize=["num_rows", "listed"])
def _bracket_rows(
    whole_ptr, floats_ptr, adjusted_ptr, most_ptr, state_ptr, aims_ptr, pivots_ptr, counts_ptr,
    masses_ptr, offsets_ptr, arrivals_ptr, size, whole_stride, floats_stride, num_rows, chunks,
    listed, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, FINER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_inputs(PDL)
    top_k = tl.load(whole_ptr + TOP_K * whole_stride + row).to(tl.int32)
    top_p = tl.load(floats_ptr + TOP_P * floats_stride + row)
    is_sound = tl.load(state_ptr + SOUND * num_rows + row) != 0
    has_k = top_k < size
    is_due = is_sound & (has_k | (top_p < 1.0))
    if FINER:
        is_due = tl.load(state_ptr + NUM * num_rows + row) < 0
    if is_due:
        most = tl.load(most_ptr + row)
        temperature = tl.load(floats_ptr + TEMPERATURE * floats_stride + row)
        j = tl.arange(0, LEVELS)
        old_low, old_base = tl.sum(j * 0, 0), tl.sum((j * 0).to(tl.float64), 0)
        target = old_base
        pivot_J = tl.load(pivots_ptr + j)
        if FINER:
            old_low = tl.load(state_ptr + LOW * num_rows + row)
            old_high = tl.load(state_ptr + HIGH * num_rows + row)
            old_base = tl.load(aims_ptr + BASE * num_rows + row)
            target = tl.load(aims_ptr + TARGET * num_rows + row)
            pivot_J = _finer(old_low, old_high, (j + 1).to(tl.float32) * (1.0 / LEVELS))
        v = chunk * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(adjusted_ptr + row * size + v, v < size, float("-inf"))
        key = key_of(logits, most, temperature)
        is_inside = key >= old_low
        mass = _mass_of(key)
        counts_row = counts_ptr + row * chunks * LEVELS
        masses_row = masses_ptr + row * chunks * LEVELS
        for level in tl.static_range(LEVELS):
            is_over = is_inside & (key < tl.sum(tl.where(j == level, pivot_J, 0), 0))
            tl.store(counts_row + chunk * LEVELS + level, tl.sum(is_over.to(tl.int32), 0))
            if top_k >= size:
                above = tl.sum(tl.where(is_over, mass, 0.0), 0)
                tl.store(masses_row + chunk * LEVELS + level, above)
        if arrived_last(arrivals_ptr, row, chunks):
            c = tl.arange(0, CHUNKS)
            at = c[:, None] * LEVELS + j[None, :]
            given = (c < chunks)[:, None] & (j >= 0)[None, :]
            count_CJ = tl.load(counts_row + at, given, 0, cache_modifier=".cg")
            weighed = tl.where(top_k >= size, given, False)
            mass_CJ = tl.load(masses_row + at, weighed, 0.0, cache_modifier=".cg")
            mass_J = tl.sum(mass_CJ, 0)
            weight_J = tl.where(has_k, tl.sum(count_CJ, 0).to(tl.float64), mass_J)
            if FINER:
                weight_J += old_base
            else:
                share = top_p.to(tl.float64) * tl.max(mass_J, 0)
                target = tl.where(has_k, top_k.to(tl.float64), share)
            index = tl.min(tl.where(weight_J >= target, j, LEVELS), 0)
            if (index < LEVELS) | (top_p < 1.0):  # else all that is possible is among the k best
                index = tl.minimum(index, LEVELS - 1)
                # Top-p after top-k looks at all that is better than the bracket, too.
                under = tl.where(has_k & (top_p < 1.0), -1, index - 1)
                high = tl.sum(tl.where(j == index, pivot_J, 0), 0)
                low = tl.where(under < 0, old_low, tl.sum(tl.where(j == under, pivot_J, 0), 0))
                above = tl.sum(tl.where(j == under, weight_J, 0.0), 0)
                is_in_J = (j == index).to(tl.int32) - (j == under).to(tl.int32)
                num_C = tl.sum(count_CJ * is_in_J[None, :], 1)
                num = tl.sum(num_C, 0)
                tl.store(offsets_ptr + row * chunks + c, tl.cumsum(num_C, 0) - num_C, c < chunks)
                tl.store(state_ptr + LOW * num_rows + row, low)
                tl.store(state_ptr + HIGH * num_rows + row, high)
                fits = (num > 0) & (num <= listed)  # none: a sum that was rounded the other way
                tl.store(state_ptr + NUM * num_rows + row, tl.where(fits, num, -1))
                tl.store(aims_ptr + BASE * num_rows + row, tl.where(under < 0, old_base, above))
                tl.store(aims_ptr + TARGET * num_rows + row, target)
            reset(arrivals_ptr, row)


@triton.jit(do_not_specialize=["num_rows", "listed"])
def _gather_rows(
    whole_ptr, floats_ptr, adjusted_ptr, most_ptr, state_ptr, aims_ptr, offsets_ptr, listed_ptr,
    size, whole_stride, floats_stride, num_rows, chunks, listed, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_inputs(PDL)
    if tl.load(state_ptr + NUM * num_rows + row) > 0:
        most = tl.load(most_ptr + row)
        temperature = tl.load(floats_ptr + TEMPERATURE * floats_stride + row)
        low = tl.load(state_ptr + LOW * num_rows + row)
        high = tl.load(state_ptr + HIGH * num_rows + row)
        v = chunk * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(adjusted_ptr + row * size + v, v < size, float("-inf"))
        key = key_of(logits, most, temperature)
        is_in = (key >= low) & (key < high)
        before = tl.cumsum(is_in.to(tl.int32), 0) - 1
        offset = tl.load(offsets_ptr + row * chunks + chunk)
        tl.store(listed_ptr + row * listed + offset + before, key, is_in)


@triton.jit(do_not_specialize=["num_rows", "listed"])
def _select_rows(
    whole_ptr, floats_ptr, adjusted_ptr, most_ptr, state_ptr, aims_ptr, listed_ptr, size,
    whole_stride, floats_stride, num_rows, listed, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    await_inputs(PDL)
    num = tl.load(state_ptr + NUM * num_rows + row)
    if num != 0:
        top_k = tl.load(whole_ptr + TOP_K * whole_stride + row).to(tl.int32)
        top_p = tl.load(floats_ptr + TOP_P * floats_stride + row)
        most = tl.load(most_ptr + row)
        temperature = tl.load(floats_ptr + TEMPERATURE * floats_stride + row)
        low = tl.load(state_ptr + LOW * num_rows + row)
        high = tl.load(state_ptr + HIGH * num_rows + row)
        base = tl.load(aims_ptr + BASE * num_rows + row)
        target = tl.load(aims_ptr + TARGET * num_rows + row)
        keys, logits = listed_ptr + row * listed, adjusted_ptr + row * size
        has_k = top_k < size
        found = _search(
            keys, logits, num, size, most, temperature, low, high, base, target, has_k, BLOCK
        )
        if has_k & (top_p < 1.0):
            above = _weigh(keys, logits, num, size, most, temperature, low, found, has_k, BLOCK)
            by_mass = top_k < 0  # never: not by number
            mass = _weigh(keys, logits, num, size, most, temperature, low, found, by_mass, BLOCK)
            # Of those that tie with the last of the k best, as many as the k best have room for.
            mass += (top_k.to(tl.float64) - above) * _mass_of(found)
            share = top_p.to(tl.float64) * mass
            found = _search(
                keys, logits, num, size, most, temperature, low, found + 1, base * 0.0, share,
                top_k < 0, BLOCK,
            )  # fmt: skip
        limit = tl.load(state_ptr + LIMIT * num_rows + row)
        tl.store(state_ptr + LIMIT * num_rows + row, tl.minimum(limit, found))


@triton.jit
def _search(
    keys_ptr, logits_ptr, num, size, most, temperature, low, high, base, target, by_number,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest number whose smaller keys weigh less than `target`; low does, high does not."""
    under, over = low, high
    while over - under > 1:
        middle = under + (over - under) // 2
        weight = base + _weigh(
            keys_ptr, logits_ptr, num, size, most, temperature, low, middle, by_number, BLOCK
        )
        is_less = weight < target
        under = tl.where(is_less, middle, under)
        over = tl.where(is_less, over, middle)
    return under


@triton.jit
def _weigh(
    keys_ptr, logits_ptr, num, size, most, temperature, low, high, by_number, BLOCK: tl.constexpr,
):  # fmt: skip
    """The number, or the mass, of the keys from `low` to below `high`."""
    weight = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, tl.where(num < 0, size, num), BLOCK):
        i = start + tl.arange(0, BLOCK)
        if num < 0:
            key = key_of(tl.load(logits_ptr + i, i < size, float("-inf")), most, temperature)
        else:
            key = tl.load(keys_ptr + i, i < num, 0x7F800000)
        is_in = (key >= low) & (key < high)
        weight += tl.where(is_in, tl.where(by_number, 1.0, _mass_of(key)), 0.0)
    return tl.sum(weight, 0)
