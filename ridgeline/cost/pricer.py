"""How long will a step take? The same answer as `roofline.step_cost`, fast enough for every step.

Products depend on the number of tokens only and are priced once for each number (of captured steps
with prompts once for each size that these have); attention needs a few sums over the requests.
`DecodeRun` goes further: the times of the next j decode steps of the same requests, each longer by
one token, in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.cost.constants import AttentionConstants
from ridgeline.cost.decode_run import DecodeLine, DecodeRun
from ridgeline.cost.manner import LEVELS, Manner, Manners, sent_tokens
from ridgeline.cost.ops import (
    Op,
    attends_once,
    decode_op,
    distinct_layers,
    output_ops,
    prefill_op,
    token_ops,
)
from ridgeline.cost.roofline import (
    StepCost,
    combine,
    is_lone,
    op_cost,
    step_cost,
)
from ridgeline.cost.setup import Setup
from ridgeline.cost.totals import (
    AttentionTotals,
    StepTotals,
    attention_kinds,
    decode_totals,
    step_totals,
)
from ridgeline.step import StepShape

__all__ = ["DecodeRun", "Pricer", "Setup"]

NUM_LATEST = 8  # steps in flight are asked about again when they are over


@dataclass(frozen=True, slots=True)
class _PrefillLine:
    """Seconds of one layer's prefill attention: s_p (per_flop f + per_key k + per_token m + t0)."""

    per_flop_s: float
    per_key_s: float
    per_token_s: float
    t0_s: float
    mixed: float

    def seconds(self, sums: AttentionTotals, num_tokens: int, *, is_mixed: bool) -> float:
        alone = (
            sums.prefill_flops * self.per_flop_s
            + sums.prefill_keys * self.per_key_s
            + num_tokens * self.per_token_s
            + self.t0_s
        )
        return alone * self.mixed if is_mixed else alone


@dataclass(frozen=True, slots=True)
class _CheckLine:
    """Seconds of one layer's attention of a few new tokens of each request: those of a decode,
    max(per_flop f, per_key k + per_token m) + t0, and a share of it for each further token."""

    decode: DecodeLine
    per_flop_s: float
    constants: AttentionConstants

    def seconds(self, sums: AttentionTotals, num_tokens: int, longest: int) -> float:
        compute = sums.prefill_flops * self.per_flop_s
        memory = sums.prefill_keys * self.decode.memory_per_key_s
        memory += num_tokens * self.decode.memory_per_row_s
        return self.constants.check_s(max(compute, memory) + self.decode.t0_s, longest)


class Pricer:
    """Prices steps of one setup. `seconds` is the StepPricer protocol of `step.py`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._constants = setup.constants
        self._manners = Manners(setup)
        self._layers = distinct_layers(setup.spec)
        counts = attention_kinds(setup.spec)
        self.kinds: tuple[AttentionSpec, ...] = tuple(counts)
        self._counts = tuple(counts.values())
        self._prefill = tuple(self._prefill_line(kind) for kind in self.kinds)
        self._decode = {wait: self._decode_lines(wait) for wait in self._waits()}
        self._checks = {
            wait: tuple(map(self._check_line, lines)) for wait, lines in self._decode.items()
        }
        self._tokens: dict[tuple[int, Manner], tuple[float, int]] = {}
        self._rows: dict[tuple[int, Manner], tuple[float, int]] = {}
        # The last shapes that were summed up; told apart by identity, as comparing takes longer.
        self._latest: tuple[tuple[object, StepTotals], ...] = ()
        # The last prices: of which sums, rows of logits and seconds of guessing.
        self._priced: tuple[tuple[StepTotals, int, tuple[float, float], float], ...] = ()

    # -- one step

    def seconds(self, shape: StepShape, num_logits: int | None = None) -> float:
        """Expected seconds of a step of which `num_logits` rows need logits (None: one of every
        request)."""
        return self.seconds_of(self.totals(shape), num_logits)

    def decodes_seconds(self, contexts: tuple[int, ...]) -> float:
        """The same of a step with one new token after each of these contexts."""
        return self.seconds_of(self.decode_totals(contexts))

    def totals(self, shape: StepShape) -> StepTotals:
        for known, totals in self._latest:
            if known is shape:
                return totals
        return self._remember(shape, step_totals(self.kinds, shape))

    def decode_totals(self, contexts: tuple[int, ...]) -> StepTotals:
        """Sums of a step with one new token after each of these contexts."""
        for known, totals in self._latest:
            if known is contexts:
                return totals
        return self._remember(contexts, decode_totals(self.kinds, contexts))

    def _remember(self, what: object, totals: StepTotals) -> StepTotals:
        self._latest = ((what, totals), *self._latest[: NUM_LATEST - 1])
        return totals

    def seconds_of(
        self,
        totals: StepTotals,
        num_logits: int | None = None,
        drafting_s: float = 0.0,
        host_s: float = 0.0,
    ) -> float:
        """Expected seconds of a step with these sums and `num_logits` rows of logits (None: one
        per request), in which the device makes guesses for `drafting_s` before and the host works
        for `host_s` more than for other such steps."""
        num_logits = totals.num_requests if num_logits is None else num_logits
        more = drafting_s, host_s
        for known, logits, others, seconds in self._priced:
            if known is totals and logits == num_logits and others == more:
                return seconds
        manner = self._manners.of(totals)
        kernels, launches = self._kernels(totals, num_logits, manner)
        seconds = combine(
            self._constants.host,
            kernels + drafting_s,
            totals.num_requests,
            0 if manner.captured else launches,
            is_lone=is_lone(totals),
            num_checked=totals.num_checked,
            more_s=host_s,
        )[2]
        self._priced = ((totals, num_logits, more, seconds), *self._priced[: NUM_LATEST - 1])
        return seconds

    def pass_seconds_of(self, totals: StepTotals, num_logits: int | None = None) -> float:
        """Of a pass that guesses: the device's part of such a step, in which the host has none."""
        manner = self._manners.of(totals)
        kernels, launches = self._kernels(totals, num_logits, manner, is_planned=False)
        launch_s = 0.0 if manner.captured else launches * self._constants.host.per_launch_s
        return max(kernels, launch_s)

    def _kernels(
        self,
        totals: StepTotals,
        num_logits: int | None,
        manner: Manner,
        *,
        is_planned: bool = True,
    ) -> tuple[float, int]:
        """Seconds and number of all kernels."""
        kernels, launches = self._fixed(
            sent_tokens(self._constants.host, manner, totals),
            totals.num_requests if num_logits is None else num_logits,
            manner,
        )
        kernels += self._beside_s(manner, is_planned=is_planned)
        mixed, wait = totals.is_mixed, manner.wait(self._constants.host)
        decode = self._decode[wait]
        for i, sums in enumerate(totals.attention):
            count = self._counts[i]
            if totals.num_decodes:
                launches += count
                kernels += count * decode[i].seconds(
                    totals.num_decodes, sums.decode_keys, sums.longest_decode, is_mixed=mixed
                )
            if totals.num_prefill_tokens:
                launches += count
                kernels += count * self._several_seconds(i, sums, totals, wait)
        return kernels, launches

    def _several_seconds(
        self, i: int, sums: AttentionTotals, totals: StepTotals, wait: float
    ) -> float:
        """Attention of the requests with several new tokens, in one layer of kind `i`."""
        if attends_once(self.kinds[i], totals):
            line = self._checks[wait][i]
            return line.seconds(sums, totals.num_prefill_tokens, totals.longest_chunk)
        return self._prefill[i].seconds(sums, totals.num_prefill_tokens, is_mixed=totals.is_mixed)

    def cost(self, shape: StepShape, num_logits: int | None = None) -> StepCost:
        """The same step operator by operator; many times slower."""
        return step_cost(self.setup, shape, num_logits)

    # -- many decode steps

    @property
    def decode_is_linear(self) -> bool:
        """No layer has a window: sums and longest context say all about a set of decodes."""
        return all(kind.window is None for kind in self.kinds)

    def decode_run(
        self, contexts: Sequence[int], num_logits: int | None = None, *, is_planned: bool = True
    ) -> DecodeRun:
        """The coming decode steps of requests with `contexts` computed tokens each, all in the
        manner of the first. `is_planned` False: the host has no part in them, as in passes that
        guess."""
        rows, host = len(contexts), self._constants.host
        manner = self._manners.of(decode_totals(self.kinds, tuple(contexts)))
        fixed, launches = self._fixed(rows, rows if num_logits is None else num_logits, manner)
        launches += sum(self._counts)
        return DecodeRun(
            contexts,
            tuple(kind.window for kind in self.kinds),
            self._decode[manner.wait(host)],
            self._counts,
            fixed + self._beside_s(manner, is_planned=is_planned),
            host if is_planned else replace(host, c0_s=0.0, c1_s=0.0),
            0 if manner.captured else launches,
        )

    def decode_seconds(self, contexts: Sequence[int], num_steps: int) -> list[float]:
        """Seconds of each of the next `num_steps` decode steps of these requests."""
        run = self.decode_run(contexts)
        return [run.seconds(step) for step in range(num_steps)]

    # -- what does not change from step to step

    def _fixed(self, num_tokens: int, num_rows: int, manner: Manner) -> tuple[float, int]:
        """Kernel seconds and launches of all but attention."""
        key = (num_tokens, manner)
        by_tokens = self._tokens.get(key)
        if by_tokens is None:
            by_tokens = self._tokens[key] = self._token_seconds(*key)
        key = (num_rows, manner)
        by_rows = self._rows.get(key)
        if by_rows is None:
            by_rows = self._rows[key] = self._row_seconds(*key)
        return by_tokens[0] + by_rows[0], by_tokens[1] + by_rows[1]

    def _beside_s(self, manner: Manner, *, is_planned: bool) -> float:
        """What is no operator of the model, of a step or of a pass that guesses."""
        host = self._constants.host
        if not manner.captured:
            return 0.0
        return host.captured_s if is_planned else host.pass_s

    def _token_seconds(self, num_tokens: int, manner: Manner) -> tuple[float, int]:
        if not num_tokens:
            return 0.0, 0
        setup = self.setup
        spec, layout, precision = setup.spec, setup.layout, setup.precision
        return self._sum(
            tuple(token_ops(spec, num_tokens, layout, precision, self._layers)), manner
        )

    def _row_seconds(self, num_rows: int, manner: Manner) -> tuple[float, int]:
        setup = self.setup
        ops = output_ops(setup.spec, num_rows, setup.layout, setup.precision)
        return self._sum(ops, manner)

    def _sum(self, ops: Sequence[Op], manner: Manner) -> tuple[float, int]:
        device, constants = self.setup.device, self._constants
        costs = (op_cost(op, device, constants, manner) for op in ops)
        return sum(cost.expected_s for cost in costs), sum(op.count for op in ops)

    def _waits(self) -> set[float]:
        """All shares of a decode's t0 that there are; see `Manner.wait`."""
        host = self._constants.host
        return {Manner(warm=level / LEVELS).wait(host) for level in range(LEVELS + 1)}

    def _decode_lines(self, wait: float) -> tuple[DecodeLine, ...]:
        lines = map(self._decode_line, self.kinds)
        return tuple(replace(line, t0_s=wait * line.t0_s) for line in lines)

    def _attention_constants(self) -> AttentionConstants:
        return self._constants.attention_for(self.setup.precision.short_dtype)

    def _decode_line(self, kind: AttentionSpec) -> DecodeLine:
        setup, c = self.setup, self._attention_constants()
        row = decode_op(kind, 1, 1, AttentionTotals(), setup.layout, setup.precision)
        key = decode_op(kind, 1, 0, AttentionTotals(1, 1), setup.layout, setup.precision)
        peak = c.decode_e_c * setup.device.peak(setup.precision.short_dtype)
        rate = c.decode_e_m * setup.device.bandwidth
        return DecodeLine(
            compute_per_key_s=key.flops / peak,
            memory_per_key_s=key.bytes / rate,
            memory_per_row_s=row.bytes / rate,
            t0_s=c.decode_t0_s,
            skew=c.skew,
            mixed=c.mixed_decode,
            overlap_s=c.mixed_overlap_s,
        )

    def _check_line(self, decode: DecodeLine) -> _CheckLine:
        setup, c = self.setup, self._attention_constants()
        peak = c.decode_e_c * setup.device.peak(setup.precision.short_dtype)
        return _CheckLine(decode, 1.0 / setup.layout.tp / peak, c)

    def _prefill_line(self, kind: AttentionSpec) -> _PrefillLine:
        setup, c = self.setup, self._attention_constants()
        token = prefill_op(
            kind, 1, AttentionTotals(), setup.layout, setup.precision, StepTotals(1, 0, 1, 1, ())
        )
        key = prefill_op(
            kind,
            1,
            AttentionTotals(prefill_keys=1),
            setup.layout,
            setup.precision,
            StepTotals(1, 0, 0, 0, ()),
        )
        peak = c.prefill_e_c * setup.device.peak(setup.precision.short_dtype)
        rate = c.prefill_e_m * setup.device.bandwidth
        return _PrefillLine(
            1.0 / setup.layout.tp / peak,
            key.bytes / rate,
            token.bytes / rate,
            c.prefill_t0_s,
            max(1.0, c.mixed_prefill),
        )
