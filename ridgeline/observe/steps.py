"""What has the engine done? Counters that follow its steps, as one of its listeners."""

from __future__ import annotations

from ridgeline.step import Listener, StepRecord


class StepCounters(Listener):
    """Steps, tokens, prefix hits and the time that steps took; all only rise.

    `take_started` gives the rows that plans opened since it was last called, and when each plan was
    made: requests that run for the first time, and again those that come back from a preemption.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_failed_steps = 0
        self.last_failed = False
        self.num_scheduled_tokens = 0
        self.num_prompt_tokens = 0  # looked up in the prefix cache
        self.num_hit_tokens = 0  # and found there
        self.busy_s = 0.0  # with at least one step in flight
        self._busy_until = 0.0
        self._started: list[tuple[str, float]] = []

    def on_step(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.last_failed = record.error is not None
        self.num_failed_steps += self.last_failed
        plan, ended = record.plan, record.collected_at
        self.num_scheduled_tokens += sum([entry.num_tokens for entry in plan.scheduled])
        self.busy_s += max(0.0, ended - max(record.launched_at, self._busy_until))
        self._busy_until = max(self._busy_until, ended)
        if not plan.new:
            return
        starts = {entry.request_id: entry.start for entry in plan.scheduled}
        for row in plan.new:
            self._started.append((row.request_id, record.launched_at))
            if len(row.token_ids) == row.num_prompt_tokens:
                self.num_prompt_tokens += row.num_prompt_tokens
                self.num_hit_tokens += starts.get(row.request_id, 0)

    def take_started(self) -> tuple[tuple[str, float], ...]:
        started, self._started = tuple(self._started), []
        return started
