"""Everything that a scheduler knows, as plain values that can be compared."""

from __future__ import annotations

from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import StepPlan


def state_of(scheduler: Scheduler) -> object:
    """All that the scheduler and the block manager know, in order."""
    state, blocks = scheduler.state, scheduler.blocks
    blocks.hash_blocks()
    shares = blocks._shares
    rows = [
        (
            name,
            tuple(r.token_ids),
            [list(table) for table in r.block_ids],
            list(r.block_hashes),
            r.num_computed_tokens,
            r.num_done_tokens,
            r.num_published_blocks,
            r.num_tokens_with_slots,
            list(r.num_dropped_blocks),
            (r.num_preemptions, r.epoch, r.has_row, r.has_output, r.order),
        )
        for name, r in scheduler.requests.items()
    ]
    cache = blocks._cache
    return (
        rows,
        list(blocks._free),
        list(blocks._deferred.items()),
        list(blocks._ref_count),
        shares and [holder and (holder.tenant, holder.last_use) for holder in shares._holder_of],
        blocks._last_completed,
        {step: list(made) for step, made in blocks._published_early.items()},
        list(cache._hash_of),
        [dict(table) for table in cache._block_of],
        (state.last_planned, state.last_completed, state.num_preemptions, state.num_changes),
        (list(state.preempted), list(state.finished)),
        [
            (plan, [(e, row.request_id, n) for e, row, n in f])
            for plan, f in scheduler.in_flight.values()
        ],
    )


def named(plan: StepPlan) -> object:
    """A plan without what cannot be compared."""
    lists = (plan.new, plan.copies, plan.preempted, plan.finished)
    return (plan.step_id, plan.scheduled, *lists, plan.decodes)
