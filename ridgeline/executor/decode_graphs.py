"""How does a whole decode step run as one launch? Captured once for each size, replayed ever after.

A graph holds everything from tokens to tokens: the inputs of the step (from the rows' last tokens
and tables, which stay on the device), all layers, the output matrix and the draw. The host sends
which rows the step is for, where they stand and which blocks are new; nothing it does grows with
the model. Sizes are rounded up to buckets; padding rows are those of row 0, which nobody has and
whose table leads to the null block. Of each size there is a graph for each way of sampling,
captured when it is first asked for. With k drafts behind its newest token (`draft_graphs`) a row
has Q = k + 1 new tokens; here k is 0.
Letters: B rows of a bucket, N rows there is room for, M blocks per table row, g KV groups,
T = B * Q new tokens, V vocabulary, Y numbers of a row's answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Generic, TypeVar

import torch

from ridgeline.attention.layout import DecodeLayout, ForwardBatch
from ridgeline.devices import Device
from ridgeline.executor.device_rows import DeviceControls, DeviceDraws, DeviceTables
from ridgeline.executor.rows import PADDING_ROW, Rows
from ridgeline.executor.transfer import Array, Transfer
from ridgeline.kernels.drafts import first_inputs
from ridgeline.kernels.draw_rows import Draws, draw_rows
from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.step_inputs import StepInputs, make_step_inputs, remember, step_inputs
from ridgeline.kvcache import KVCache, LatentKV
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts
from ridgeline.sampling.batch import HostDraws
from ridgeline.sampling.controls import RowControls

# A row of padding costs little as long as weights are what takes the time.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def why_not_captured(decoder: Decoder, kv: KVCache) -> str | None:
    """The first reason against captured steps, None when there is none."""
    if decoder.not_captured:
        return decoder.not_captured
    if not decoder.backend.captures_decodes:
        return f"attention backend {decoder.backend.name} cannot be captured"
    first = kv.layers[0]
    if (first.latent_NSC if isinstance(first, LatentKV) else first.views) is None:
        return f"KV format {kv.format.name} is not written in place"
    if (ranks := decoder.placement.collective) is not None and not ranks.captures:
        return f"ranks talk by {type(ranks).__name__}, which no captured step can call"
    experts = [x.feed_forward for x in decoder.layers if isinstance(x.feed_forward, Experts)]
    if any(one.asks_host for one in experts):
        return "the host must know which experts a step needs"
    return None


Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """What captured steps of one executor share."""

    decoder: Decoder
    kv: KVCache
    rows: Rows
    tables: DeviceTables
    transfer: Transfer
    device: Device


class CapturedSteps(ABC, Generic[Key]):
    """Steps by what distinguishes their graphs. A subclass says how one is captured (`_capture`);
    all share its buffers and their memory."""

    def __init__(self, shared: ExecutorParts) -> None:
        self._decoder, self._kv, self._rows = shared.decoder, shared.kv, shared.rows
        self._tables, self._transfer, self._device = shared.tables, shared.transfer, shared.device
        self.num_steps = 0
        self._graphs: dict[Key, Callable[[], None]] = {}
        self._captured_tables: torch.Tensor | None = None

    @abstractmethod
    def _capture(self, key: Key) -> Callable[[], None]:
        """What replays this step: captured on padding alone, so that nobody's cache, counts and
        history are touched."""

    def _prepare(self, key: Key) -> bool:
        """Capture this step before one is asked for. False: it is. Nothing may be in flight."""
        self._follow(key)
        if key in self._graphs:
            return False
        self._graphs[key] = self._capture(key)
        return True

    def _captured(self, key: Key) -> Callable[[], None]:
        """What replays this step."""
        self._follow(key)
        replay = self._graphs.get(key)
        if replay is None:
            replay = self._graphs[key] = self._capture(key)
        return replay

    def _follow(self, key: Key) -> None:
        """Forget what was captured over memory that is not used any more."""
        self._tables.follow()
        if self._captured_tables is not self._tables.tables_gNM:
            self._captured_tables = self._tables.tables_gNM
            self._graphs.clear()


class Sampling(Enum):
    """How the rows of a captured step are sampled. CONTROLLED does all that those before it do;
    ODDS keeps drafts of a model by their odds; with LOGITS torch samples behind the step."""

    GREEDY = "greedy"
    TEMPERATURES = "temperatures"
    CONTROLLED = "controlled"
    ODDS = "odds"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True, eq=False)
class RowDraws:
    """How each row of a step is drawn at its places, and its drafts by a model: the same but for
    their keys. `by_odds_R` (bool) are rows whose drafts are verified by their odds."""

    places_R: HostDraws
    drafts_R: HostDraws
    by_odds_R: Array


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """What the host says of one decode step: `sent_XB`, padded to a bucket, as the first kernel of
    the step wants it. Line 0 has the rows' places among N."""

    num_rows: int
    sent_XB: Array
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CapturedOutput:
    """All of it is overwritten by the next step. `answers` are what the host reads: the rows' new
    tokens [R], -1 without a finite logit, or with drafts numbers of each row [R, Y]; None after a
    step that ended at the logits."""

    answers: torch.Tensor | None
    logits_TV: torch.Tensor  # float32
    token_ids_T: torch.Tensor  # that were computed: each row's newest token, then its drafts
    positions_T: torch.Tensor  # where the tokens that come out stand
    sent_XR: torch.Tensor
    draft_logits_BkV: torch.Tensor | None = None


StepKey = tuple[int, int, Sampling]  # bucket, drafts of each row, sampling
# What a row of an engine that drafts tells before its tokens: how many came out, how many drafts
# there were, was the first right; last, how many drafts lie behind them now.
BEFORE_IDS = 3
RowSampling = HostDraws | RowDraws | RowControls | None  # None: all rows are greedy


class DecodeGraphs(CapturedSteps[StepKey]):
    """The captured decode steps of one engine, of up to `max_rows` rows and `max_tokens` new
    tokens of all of them."""

    # Of `sent_XB`, beside places and positions: for each KV group a new block or -1.
    lines_per_group = 1

    def __init__(
        self,
        shared: ExecutorParts,
        *,
        max_rows: int,
        max_tokens: int = 0,
        max_draft_tokens: int = 0,
    ) -> None:
        super().__init__(shared)
        self.buckets = [b for b in BUCKETS if b < max_rows]
        self.buckets.append(min(max_rows, BUCKETS[-1]))
        most_rows = self.buckets[-1]
        self.max_tokens = most = max(max_tokens, most_rows)
        where, num_groups = self._decoder.device, len(self._kv.groups)
        self._num_lines = 2 + self.lines_per_group * num_groups
        self._sent = torch.zeros(self._num_lines * most_rows, dtype=torch.int64, device=where)
        self._inputs = make_step_inputs(num_groups, most, where)
        self._starts = [
            torch.arange(most_rows + 1, dtype=torch.int32, device=where) * num_new
            for num_new in range(1, max_draft_tokens + 2)
        ]
        vocab_size = self._decoder.spec.vocab_size
        self._logits = torch.empty(most, vocab_size, dtype=torch.float32, device=where)
        self._answers = torch.zeros(most * (BEFORE_IDS + 3), dtype=torch.int64, device=where)
        self._draws = DeviceDraws([most, most_rows], self._transfer, where, num_flags=most_rows)
        self._controls = DeviceControls(vocab_size, most, self._rows.counts, self._transfer)
        self._workspace = make_workspace(where, 3 * most * (vocab_size // 4096 + 1), most)
        # On a CPU that is torch's work, which cannot be recorded.
        self.samples_controlled = self._decoder.backend.name != "native"
        self._drawn_for: HostDraws | RowDraws | None = None
        self._drawn_each = 0
        self._seen: dict[tuple[int, StepKey], tuple[torch.Tensor, CapturedOutput]] = {}

    # --------------------------------------------------------------------------- a step

    def prepare(self, bucket: int, num_draft_tokens: int, sampling: Sampling) -> bool:
        """Capture the steps of this size before one is asked for. False: they are. Nothing may be
        in flight."""
        return self._prepare((bucket, num_draft_tokens, sampling))

    def run(self, step: CapturedStep, asked: RowSampling, sampling: Sampling) -> CapturedOutput:
        """Send the step off. The rows remember their tokens; penalised rows count them if they are
        sampled by their controls."""
        key = step.sent_XB.shape[1], step.num_draft_tokens, sampling
        replay = self._captured(key)
        if isinstance(asked, RowControls):
            self._controls.take(asked)
        elif asked is not None:
            self._take_draws(asked, step.num_draft_tokens + 1)
        seen = self._seen.get((step.num_rows, key))
        if seen is None:
            seen = self._sent[: step.sent_XB.size], self._output(step.num_rows, key)
            self._seen[step.num_rows, key] = seen
        sent, output = seen
        self._transfer.send_into(step.sent_XB, sent)
        replay()
        self.num_steps += 1
        return output

    def _output(self, num: int, key: StepKey) -> CapturedOutput:
        """Where a step of `num` rows leaves what."""
        bucket, k, sampling = key
        num_tokens = num * (k + 1)
        return CapturedOutput(
            None if sampling is Sampling.LOGITS else self._answers_of(bucket, k + 1)[:num],
            self._logits[:num_tokens],
            self._inputs.token_ids_B[:num_tokens],
            self._inputs.next_positions_B[:num_tokens],
            self._sent_of(bucket)[:, :num],
        )

    def _sent_of(self, bucket: int) -> torch.Tensor:
        return self._sent[: self._num_lines * bucket].view(-1, bucket)

    def _answers_of(self, num_rows: int, num_new: int) -> torch.Tensor:
        """What the host will read of so many rows."""
        return self._answers[:num_rows]

    def _take_draws(self, asked: HostDraws | RowDraws, num_new: int) -> None:
        """Rows behind those are padding, however they are drawn."""
        if self._drawn_for is asked and self._drawn_each == num_new:
            return
        if isinstance(asked, RowDraws):
            self._draws.put(0, asked.places_R, num_new)
            self._draws.put(1, asked.drafts_R)
            self._draws.put_flags(asked.by_odds_R)
        else:
            self._draws.put(0, asked, num_new)
        self._draws.send()
        self._drawn_for, self._drawn_each = asked, num_new

    def _follow(self, key: StepKey) -> None:
        super()._follow(key)
        if not self._graphs:
            self._seen.clear()
        if key[2] is Sampling.CONTROLLED and self._controls.follow():
            self._graphs = {at: run for at, run in self._graphs.items() if at[2] is not key[2]}

    # -------------------------------------------------------------------------- capture

    def _capture(self, key: StepKey) -> Callable[[], None]:
        sent_XB = self._sent_of(key[0])
        sent_XB[0], sent_XB[1], sent_XB[2:] = PADDING_ROW, 0, -1
        if key[2] is Sampling.CONTROLLED:
            self._controls.clear()
        return self._device.capture(partial(self._launch, key))

    def _launch(self, key: StepKey) -> None:
        """A whole step; each part can be another where tokens are drafted."""
        bucket, k, sampling = key
        num_new, sent_XB = k + 1, self._sent_of(bucket)
        inputs = first_inputs(self._inputs, bucket, num_new)
        self._begin(key, sent_XB, inputs)
        logits_TV = self._logits[: bucket * num_new]
        self._forward(self._batch(sent_XB[0], num_new), logits_TV)
        if sampling is not Sampling.LOGITS:
            ids_T, is_sound_T = self._draw(key, logits_TV, inputs)
            self._end(ids_T, is_sound_T, sent_XB, self._answers_of(bucket, num_new))

    def _begin(self, key: StepKey, sent_XB: torch.Tensor, inputs: StepInputs) -> None:
        """Fills `inputs`."""
        tables_gNM, size = self._tables.tables_gNM, self._kv.block_size
        step_inputs(sent_XB, self._rows.last_ids_N, tables_gNM, inputs, size)

    def _batch(self, rows_B: torch.Tensor, num_new: int) -> ForwardBatch:
        """Of a step whose inputs are there."""
        num = len(rows_B)
        inputs = first_inputs(self._inputs, num, num_new)
        layout = DecodeLayout(
            rows_B, tuple(self._tables.tables_gNM), inputs.seq_lens_B,
            self._starts[num_new - 1][: num + 1], tuple(inputs.slots_gB),
            self._kv.block_size, num_new,
        )  # fmt: skip
        return ForwardBatch(inputs.token_ids_B, inputs.positions_B, layout)

    def _forward(self, batch: ForwardBatch, logits_TV: torch.Tensor) -> None:
        self._decoder.forward_logits(batch, self._kv, logits_TV)

    def _draw(
        self, key: StepKey, logits_TV: torch.Tensor, inputs: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(Token that comes out at each place; is sound.)"""
        positions_T = inputs.next_positions_B
        if key[2] is Sampling.CONTROLLED:
            return self._controls.draw(logits_TV, positions_T)
        return draw_rows(logits_TV, positions_T, self._place_draws(key), workspace=self._workspace)

    def _place_draws(self, key: StepKey) -> Draws | None:
        if key[2] is Sampling.GREEDY:
            return None
        return self._draws.parts[0].first(key[0] * (key[1] + 1))

    def _end(
        self,
        ids_T: torch.Tensor,
        is_sound_T: torch.Tensor,
        sent_XB: torch.Tensor,
        answers: torch.Tensor,
    ) -> None:
        remember(ids_T, is_sound_T, sent_XB[0], self._rows.last_ids_N, answers)
