"""Which request was in which slot of an engine, when, and what was computed for it there?

A run as lanes, one for each slot (`max_num_seqs`): what a picture of static or continuous batching
is drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ridgeline.errors import check
from ridgeline.request import RequestOutput
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import Listener, ScheduledRequest, StepPlan, StepResult

Kind = Literal["prompt", "again", "answer", "held", "idle"]


class Piece(msgspec.Struct):
    """`num_steps` steps on end that were alike for a slot. `prompt`: tokens of a prompt were
    computed, `again`: tokens that had been computed before a preemption, `answer`: a token of the
    answer came out; `held`: the request got no token of the step's budget; `idle`: nobody was in
    the slot (`request` is "")."""

    slot: int
    request: str
    kind: Kind
    start_s: float
    end_s: float
    num_steps: int = 1


class Lanes(Listener):
    """`pieces` in order of their beginning; `preemptions` are (time, request)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_slots = scheduler.max_num_seqs
        self.pieces: list[Piece] = []
        self.preemptions: list[tuple[float, str]] = []
        self._slots: dict[str, int] = {}
        self._free = list(range(self.num_slots))
        self._last: list[Piece | None] = [None] * self.num_slots
        self._num_prompt: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}
        self._launched: dict[int, float] = {}
        self._ended_s = 0.0

    def count(self, kind: Kind) -> int:
        """Slots times steps that were of this kind."""
        return sum(piece.num_steps for piece in self.pieces if piece.kind == kind)

    def on_plan(self, plan: StepPlan, now: float) -> None:
        if plan.scheduled:
            self._launched[plan.step_id] = now

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        start_s = max(self._ended_s, self._launched.pop(plan.step_id))
        for row in plan.preempted:
            if row in self._slots:
                self.preemptions.append((start_s, row))
                self._leave(row)
        for row in plan.finished:
            self._leave(row)
        for new in plan.new:
            self._num_prompt.setdefault(new.request_id, new.num_prompt_tokens)
        taken = dict[int, ScheduledRequest]()
        for entry in plan.scheduled:
            taken[self._slot(entry.request_id)] = entry
        holders = {slot: row for row, slot in self._slots.items()}
        for slot in range(self.num_slots):
            row = holders.get(slot, "")
            kind: Kind = "held" if row else "idle"
            if slot in taken:
                kind = self._kind(taken[slot])
            self._add(slot, row, kind, start_s, now)
        for output in outputs:
            if output.finish_reason is not None:
                self._leave(output.request_id)
        self._ended_s = now

    def _slot(self, row: str) -> int:
        """Its own, or the first that is free."""
        if row not in self._slots:
            check(bool(self._free), "as many rows as slots run at once", row=row)
            self._free.sort()
            self._slots[row] = self._free.pop(0)
        return self._slots[row]

    def _leave(self, row: str) -> None:
        if (slot := self._slots.pop(row, None)) is not None:
            self._free.append(slot)

    def _kind(self, entry: ScheduledRequest) -> Kind:
        row = entry.request_id
        before = self._num_computed.get(row, 0)
        self._num_computed[row] = max(before, entry.start + entry.num_tokens)
        if entry.start < before:
            return "again"
        return "prompt" if entry.start < self._num_prompt[row] else "answer"

    def _add(self, slot: int, row: str, kind: Kind, start_s: float, end_s: float) -> None:
        last = self._last[slot]
        is_next = last is not None and (last.request, last.kind, last.end_s) == (row, kind, start_s)
        if last is not None and is_next:
            last.end_s = end_s
            last.num_steps += 1
            return
        self._last[slot] = piece = Piece(slot, row, kind, start_s, end_s)
        self.pieces.append(piece)
