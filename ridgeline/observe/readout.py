"""How near to its limit did the engine run, in one line or one row?"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

from ridgeline.observe.guesses import GuessReport, guess_report
from ridgeline.observe.meter import Meter
from ridgeline.observe.pricing import Totals


@dataclass(frozen=True, slots=True)
class ReadOut:
    """Some steps together. Shares are of what the devices could do at best while steps ran;
    `expected_ratio` is measured over expected time; `host_share` is of steps and gaps together;
    `padded_share` of the rows computed. `origin` says where expectations come from."""

    what: str
    num_steps: int
    measured_s: float
    expected_s: float
    ideal_s: float
    host_s: float
    bytes_per_s: float
    share_of_bandwidth: float
    flops_per_s: float
    share_of_peak: float
    padded_share: float
    origin: str
    device: str
    note: str = ""
    guesses: GuessReport | None = None

    @property
    def expected_ratio(self) -> float:
        return _ratio(self.measured_s, self.expected_s)

    @property
    def ideal_share(self) -> float:
        """How much of the measured time an ideal device would need."""
        return _ratio(self.ideal_s, self.measured_s)

    @property
    def host_share(self) -> float:
        return _ratio(self.host_s, self.host_s + self.measured_s)

    def words(self) -> str:
        """All of it in a line."""
        padding = f", {self.padded_share:.1%} of rows pad graphs" if self.padded_share else ""
        guesses = "" if self.guesses is None else f"; {self.guesses.words()}"
        return (
            f"{self.num_steps} steps: {self.bytes_per_s / 1e9:.3g} GB/s is "
            f"{self.share_of_bandwidth:.1%} of the bandwidth, {self.flops_per_s / 1e12:.3g} "
            f"TFLOP/s is {self.share_of_peak:.1%} of the peak; steps took "
            f"{self.expected_ratio:.2f}x of the expected time ({self.origin}), host gaps "
            f"{self.host_share:.1%}{padding}{guesses}"
        )


def snapshot(totals: Totals) -> Totals:
    """A copy that later steps do not change."""
    return deepcopy(totals)


def read_out(what: str, meter: Meter, after: Totals, before: Totals | None = None) -> ReadOut:
    """Of the steps between two snapshots, or of all."""
    start = before or Totals()
    seconds = after.measured_s - start.measured_s
    moved = _ratio(after.bytes - start.bytes, seconds)
    flops = _ratio(after.flops - start.flops, seconds)
    limits, setup = meter.limits, meter.pricer.setup
    padded = after.num_padded_rows - start.num_padded_rows
    return ReadOut(
        what,
        after.num_steps - start.num_steps,
        seconds,
        after.expected_s - start.expected_s,
        after.ideal_s - start.ideal_s,
        after.host_s - start.host_s,
        moved,
        moved / limits.bytes,
        flops,
        flops / limits.flops,
        _ratio(padded, padded + after.num_rows - start.num_rows),
        setup.constants.origin,
        setup.device.label,
        guesses=guesses_between(after, start),
    )


def guesses_between(after: Totals, before: Totals | None = None) -> GuessReport | None:
    """What guesses brought between two snapshots, or in all; None where there were none."""
    start = before or Totals()
    plain, plain_before = after.regimes["decode"], start.regimes["decode"]
    return guess_report(
        after.guesses.since(start.guesses),
        plain.num_steps - plain_before.num_steps,
        plain.measured_s - plain_before.measured_s,
        plain.expected_s - plain_before.expected_s,
    )


def _ratio(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
