"""How near to its limit did the engine run, in a few lines or one row?"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

from ridgeline.cost.pricer import Pricer
from ridgeline.figures import percent, scaled, seconds
from ridgeline.observe.run import Totals
from ridgeline.speculation.report import DraftReport, draft_report

NOT_CALIBRATED = "not calibrated: ridgeline calibrate"
REGIME_WORDS = {"prefill": "prompt"}  # where another word says it better


@dataclass(frozen=True, slots=True)
class Achieved:
    """What some steps did together. Shares are of what the devices could do at best while steps
    ran. `origin` says where expectations come from. Where the device is assumed, so are shares of
    it."""

    device: str
    origin: str
    num_steps: int
    measured_s: float
    expected_s: float
    bytes_per_s: float
    share_of_bandwidth: float
    flops_per_s: float
    share_of_peak: float
    drafts: DraftReport | None
    is_assumed_device: bool


@dataclass(frozen=True, slots=True)
class RunSummary(Achieved):
    """The same with all that is told of it. `expected_ratio` is measured over expected time;
    `host_share` is of steps and gaps together; `note` is what the calibration says against
    itself."""

    what: str
    ideal_s: float
    host_s: float
    note: str
    num_by_regime: dict[str, int]
    flops: float
    bytes: float

    @property
    def is_calibrated(self) -> bool:
        """A ratio to what is expected means something."""
        return self.origin != "assumed"

    @property
    def expected_ratio(self) -> float:
        return ratio(self.measured_s, self.expected_s)

    @property
    def host_share(self) -> float:
        return ratio(self.host_s, self.host_s + self.measured_s)

    def lines(self) -> Iterator[tuple[str, str]]:
        """All of it for a person: what each figure is of, and the figure."""
        kinds = ", ".join(
            f"{num} {REGIME_WORDS.get(name, name)}" for name, num in self.num_by_regime.items()
        )
        yield "steps", f"{self.num_steps} ({kinds})" if kinds else str(self.num_steps)
        yield "time", f"{seconds(self.measured_s)} in steps, {self.ratio_text()}"
        host = f"{percent(self.host_share)} of the time"
        if self.note:
            yield "note", self.note
        yield "host", f"{seconds(self.host_s)} between steps, {host}"
        moved, flops = scaled(self.bytes_per_s, "B/s"), scaled(self.flops_per_s, "FLOP/s")
        if not self.is_assumed_device:
            moved += f", {percent(self.share_of_bandwidth)} of the bandwidth"
            flops += f", {percent(self.share_of_peak)} of the peak"
        yield "memory", moved
        yield "compute", flops
        if self.drafts is not None:
            for words in self.drafts.lines(is_calibrated=self.is_calibrated):
                yield "drafts", words
        work = f"{scaled(self.flops, 'FLOP')}, {scaled(self.bytes, 'B')} moved"
        yield "cost", f"{seconds(self.measured_s)} of the device, {work}"

    def ratio_text(self) -> str:
        """Measured over expected time, where that means something."""
        if not self.is_calibrated:
            return NOT_CALIBRATED
        return f"{self.expected_ratio:.2f}x of the expected time ({self.origin})"


def snapshot(totals: Totals) -> Totals:
    """A copy that later steps do not change."""
    return deepcopy(totals)


def run_summary(
    what: str, pricer: Pricer, after: Totals, before: Totals | None = None
) -> RunSummary:
    """Of the steps between two snapshots, or of all."""
    start = before or Totals()
    busy_s = after.measured_s - start.measured_s
    moved = ratio(after.bytes - start.bytes, busy_s)
    flops = ratio(after.flops - start.flops, busy_s)
    limits, setup = pricer.limits, pricer.setup
    return RunSummary(
        device=setup.device.label,
        origin=setup.constants.origin,
        num_steps=after.num_steps - start.num_steps,
        measured_s=busy_s,
        expected_s=after.expected_s - start.expected_s,
        bytes_per_s=moved,
        share_of_bandwidth=moved / limits.bytes,
        flops_per_s=flops,
        share_of_peak=flops / limits.flops,
        drafts=drafts_between(after, start),
        is_assumed_device=setup.device.is_assumed,
        what=what,
        ideal_s=after.ideal_s - start.ideal_s,
        host_s=after.host_s - start.host_s,
        note=setup.constants.caveat,
        num_by_regime={
            name: num
            for name, regime in after.regimes.items()
            if (num := regime.num_steps - start.regimes[name].num_steps)
        },
        flops=after.flops - start.flops,
        bytes=after.bytes - start.bytes,
    )


def drafts_between(after: Totals, before: Totals | None = None) -> DraftReport | None:
    """What drafts brought between two snapshots, or in all; None where there were none."""
    start = before or Totals()
    plain, plain_before = after.regimes["decode"], start.regimes["decode"]
    return draft_report(
        after.drafts.since(start.drafts),
        plain.num_steps - plain_before.num_steps,
        plain.measured_s - plain_before.measured_s,
        plain.expected_s - plain_before.expected_s,
    )


def ratio(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
