"""How does the engine stand right now? A snapshot for the HTTP process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.clock import Clock
from ridgeline.observe.run import RankStatus, Run, Totals
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.server.wire import DraftCosts, Gauges, RegimeTime, StepCosts
from ridgeline.speculation.report import DraftTotals

if TYPE_CHECKING:
    from ridgeline.devices.device import Device

MEMORY_PERIOD_S = 1.0  # asking a device for its free memory can cost more than a step


class GaugeReader:
    def __init__(self, scheduler: Scheduler, device: Device, run: Run, clock: Clock) -> None:
        self._scheduler = scheduler
        self._device = device
        self._run = run
        self._clock = clock
        self._memory_read_at = clock.now() - MEMORY_PERIOD_S
        self._memory_used = 0
        self._expert_load: tuple[float, ...] = ()
        self._ranks: tuple[RankStatus, ...] = ()
        self._rank_load: tuple[float, ...] = ()

    def read(self) -> Gauges:
        scheduler, run = self._scheduler, self._run
        blocks = scheduler.blocks
        return Gauges(
            num_steps=run.num_steps,
            num_failed_steps=run.num_failed_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_used_blocks=blocks.num_blocks - blocks.num_free_blocks - blocks.num_deferred_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_scheduled_tokens=run.num_scheduled_tokens,
            num_prefix_queried_tokens=run.num_prompt_tokens,
            num_prefix_hit_tokens=run.num_hit_tokens,
            busy_s=run.busy_s,
            device_memory_used=self._device_memory(),
            costs=_costs(run.totals) if run.is_priced else None,
            expert_load=self._expert_load,
            ranks=self._ranks,
            rank_load=self._rank_load,
            num_expert_exchanges=run.num_exchanges(),
        )

    def _device_memory(self) -> int:
        now = self._clock.now()
        if now - self._memory_read_at >= MEMORY_PERIOD_S:
            self._memory_read_at = now
            self._memory_used = self._device.memory_total() - self._device.memory_free()
            self._expert_load = self._run.expert_load()
            self._ranks = self._run.ranks()
            self._rank_load = self._run.rank_load()
        return self._memory_used


def _costs(totals: Totals) -> StepCosts:
    return StepCosts(
        totals.measured_s,
        totals.expected_s,
        totals.ideal_s,
        totals.host_s,
        totals.flops,
        totals.bytes,
        totals.num_rows,
        tuple(
            RegimeTime(name, regime.num_steps, regime.measured_s, regime.expected_s)
            for name, regime in totals.regimes.items()
        ),
        _draft_tokens(totals.drafts),
    )


def _draft_tokens(totals: DraftTotals) -> DraftCosts:
    return DraftCosts(
        totals.num_steps,
        totals.num_rows,
        totals.num_draft_tokens,
        totals.num_accepted,
        totals.num_tokens,
        totals.drafting_s,
        totals.measured_s - totals.drafting_s,
        totals.plain_s,
        tuple(totals.num_looked),
        tuple(totals.num_right),
    )
