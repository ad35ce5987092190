"""How does a request get to a long context without computing it? For measurements only.

What a step costs depends on how many tokens lie in the cache, not on what they are. So while
`is_skipping` is set, plans are answered here with made-up tokens, and a request's row is opened on
the real executor only when a plan comes that is to be computed: with the whole context as known
tokens, and with the blocks that it got meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.measure.stopwatch import DeviceTimer
from ridgeline.step import Executor, NewRequest, StepFuture, StepPlan, StepResult

MADE_UP_TOKEN = 1


@dataclass(frozen=True, slots=True)
class _MadeUp:
    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


@dataclass(slots=True)
class _Waiting:
    """A row that the executor does not have yet."""

    new: NewRequest
    tokens: list[int]
    blocks: list[list[int]]

    def opened(self) -> NewRequest:
        return replace(
            self.new,
            token_ids=tuple(self.tokens),
            block_ids=tuple(tuple(ids) for ids in self.blocks),
        )


class ShortcutExecutor:
    """The executor inside, except for the plans that are skipped. A request whose row is open
    there must not be scheduled by a skipped plan. What `timer` is set to times the others."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self.is_skipping = False
        self.timer: DeviceTimer | None = None
        self._waiting: dict[str, _Waiting] = {}

    def submit(self, plan: StepPlan) -> StepFuture:
        for request_id in (*plan.preempted, *plan.finished):
            self._waiting.pop(request_id, None)
        if self.is_skipping:
            return self._skip(plan)
        named = {entry.request_id for entry in plan.scheduled}
        come = [self._waiting.pop(name).opened() for name in list(self._waiting) if name in named]
        whole = replace(plan, new=(*come, *plan.new)) if come else plan
        if self.timer is None:
            return self.inner.submit(whole)
        return self.timer.send(lambda: self.inner.submit(whole))

    def _skip(self, plan: StepPlan) -> StepFuture:
        if plan.preempted or plan.finished:
            self.inner.submit(replace(plan, scheduled=(), new=(), copies=())).result()
        for new in plan.new:
            blocks = [list(ids) for ids in new.block_ids]
            self._waiting[new.request_id] = _Waiting(new, list(new.token_ids), blocks)
        tokens: dict[str, tuple[int, ...]] = {}
        for entry in plan.scheduled:
            row = self._waiting[entry.request_id]
            for table, ids in zip(row.blocks, entry.new_block_ids, strict=False):
                table.extend(ids)
            if entry.samples:
                row.tokens.append(MADE_UP_TOKEN)
                tokens[entry.request_id] = (MADE_UP_TOKEN,)
        return _MadeUp(StepResult(tokens))
