"""How does a whole decode step run as one launch? Captured once for each size, replayed ever after.

A graph holds everything from tokens to tokens: the inputs of the step (from the rows' last tokens
and tables, which stay on the device), all layers, the output matrix and the draw. The host sends
which rows the step is for, where they stand and which blocks are new; nothing it does grows with
the model. Sizes are rounded up to buckets; padding rows are those of row 0, which nobody has and
whose table leads to the null block. Of each size there are up to three graphs: all rows greedy,
some at temperatures, and any sampling parameters, captured when they are first asked for.
Letters: B rows of a bucket, N rows there is room for, M blocks per table row, g KV groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from ridgeline.attention.layout import DecodeLayout, ForwardBatch
from ridgeline.devices import Device
from ridgeline.executor.device_rows import DeviceControls, DeviceDraws, DeviceTables
from ridgeline.executor.rows import PADDING_ROW, Rows
from ridgeline.executor.transfer import Array, Transfer
from ridgeline.kernels.draw_rows import draw_rows
from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.step_inputs import (
    StepInputs,
    make_step_inputs,
    remember,
    step_inputs,
)
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.feed_forward import FeedForward
from ridgeline.sampling.batch import HostDraws
from ridgeline.sampling.controls import RowControls

# A row of padding costs little as long as weights are what takes the time.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def why_not_captured(decoder: Decoder, kv: KVCache) -> str | None:
    """The first reason against captured steps, None when there is none."""
    if not decoder.backend.captures_decodes:
        return f"attention backend {decoder.backend.name} cannot be captured"
    if kv.layers[0].views is None:
        return f"KV format {kv.format.name} is not written in place"
    if decoder.placement.size > 1:
        return "the model is spread over several devices"
    if not all(isinstance(layer.feed_forward, FeedForward) for layer in decoder.layers):
        return "the host must know which experts a step needs"
    return None


class Sampling(Enum):
    """How the rows of a captured step are sampled; each does all that those before it do."""

    GREEDY = "greedy"
    TEMPERATURES = "temperatures"
    CONTROLLED = "controlled"


Wanted = HostDraws | RowControls | None  # None: all rows are greedy


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """What the host says of one decode step: `sent_XB` as `step_inputs` wants it, padded."""

    num_rows: int
    sent_XB: Array


@dataclass(frozen=True, slots=True)
class Drawn:
    """`token_ids_R` is -1 for rows without a finite logit; all are overwritten by the next step."""

    token_ids_R: torch.Tensor
    logits_RV: torch.Tensor  # float32
    positions_R: torch.Tensor  # where the new tokens stand


class DecodeGraphs:
    """The captured decode steps of one engine. All share their buffers and their memory."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        rows: Rows,
        tables: DeviceTables,
        transfer: Transfer,
        device: Device,
        *,
        max_rows: int,
    ) -> None:
        self._decoder, self._kv, self._rows, self._tables = decoder, kv, rows, tables
        self._transfer, self._device = transfer, device
        self.buckets = [b for b in BUCKETS if b < max_rows]
        self.buckets.append(min(max_rows, BUCKETS[-1]))
        most = self.buckets[-1]
        where, num_groups = decoder.device, len(kv.groups)
        self._inputs = make_step_inputs(num_groups, most, where)
        self._sent = torch.zeros((2 + num_groups) * most, dtype=torch.int64, device=where)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=where)
        vocab_size = decoder.spec.vocab_size
        self._logits = torch.empty(most, vocab_size, dtype=torch.float32, device=where)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=where)
        self._draws = DeviceDraws([most], transfer, where)
        self._drawn_for: HostDraws | None = None
        self._controls = DeviceControls(vocab_size, most, rows.counts, transfer)
        self._workspace = make_workspace(where, 3 * most * (vocab_size // 4096 + 1), most)
        # On a CPU that is torch's work, which cannot be recorded.
        self.samples_controlled = decoder.backend.name != "native"
        self.num_steps = 0
        self._graphs: dict[tuple[int, Sampling], Callable[[], None]] = {}
        self._captured_tables: torch.Tensor | None = None
        self._seen: dict[tuple[int, int], tuple[torch.Tensor, Drawn]] = {}

    # --------------------------------------------------------------------------- a step

    def prepare(self, bucket: int, sampling: Sampling) -> bool:
        """Capture the steps of this size before one is asked for. False: they are. Nothing may be
        in flight."""
        self._follow(sampling)
        if (bucket, sampling) in self._graphs:
            return False
        self._graphs[bucket, sampling] = self._capture(bucket, sampling)
        return True

    def run(self, step: CapturedStep, wanted: Wanted) -> Drawn:
        """Send the step off. The rows remember their tokens; penalised rows count them if they are
        sampled by their controls."""
        bucket, sampling = step.sent_XB.shape[1], _sampling(wanted)
        self._follow(sampling)
        replay = self._graphs.get((bucket, sampling))
        if replay is None:
            replay = self._graphs[bucket, sampling] = self._capture(bucket, sampling)
        if isinstance(wanted, RowControls):
            self._controls.take(wanted)
        elif wanted is not None and wanted is not self._drawn_for:
            self._draws.put(0, wanted)
            self._draws.send()
            self._drawn_for = wanted
        sent, drawn = self._seen.get((bucket, step.num_rows)) or self._see(bucket, step.num_rows)
        self._transfer.send_into(step.sent_XB, sent)
        replay()
        self.num_steps += 1
        return drawn

    def _see(self, bucket: int, num: int) -> tuple[torch.Tensor, Drawn]:
        """Where a step of `num` rows has its input, and leaves what."""
        positions_R = self._inputs.next_positions_B[:num]
        drawn = Drawn(self._token_ids[:num], self._logits[:num], positions_R)
        seen = self._sent[: (2 + len(self._kv.groups)) * bucket], drawn
        self._seen[bucket, num] = seen
        return seen

    def _follow(self, sampling: Sampling) -> None:
        """Forget what was captured over memory that is not used any more."""
        self._tables.follow()
        if self._captured_tables is not self._tables.tables_gNM:
            self._captured_tables = self._tables.tables_gNM
            self._graphs.clear()
        if sampling is Sampling.CONTROLLED and self._controls.follow():
            self._graphs = {at: run for at, run in self._graphs.items() if at[1] is not sampling}

    # -------------------------------------------------------------------------- capture

    def _capture(self, bucket: int, sampling: Sampling) -> Callable[[], None]:
        """On padding alone, so that nobody's cache is touched, and nobody's counts."""
        sent_XB = self._sent[: (2 + len(self._kv.groups)) * bucket].view(-1, bucket)
        sent_XB[:2] = PADDING_ROW
        sent_XB[2:] = -1
        if sampling is Sampling.CONTROLLED:
            self._controls.clear()
        return self._device.capture(partial(self._launch, sent_XB, sampling))

    def _launch(self, sent_XB: torch.Tensor, sampling: Sampling) -> None:
        num = sent_XB.shape[1]
        inputs, last_ids_N = _first(self._inputs, num), self._rows.last_ids_N
        tables_gNM = self._tables.tables_gNM
        step_inputs(sent_XB, last_ids_N, tables_gNM, inputs, self._kv.block_size)
        layout = DecodeLayout(
            sent_XB[0],
            tuple(tables_gNM),
            inputs.seq_lens_B,
            self._starts[: num + 1],
            tuple(inputs.slots_gB),
            self._kv.block_size,
        )
        batch = ForwardBatch(inputs.token_ids_B, inputs.positions_B, layout)
        logits = self._decoder.forward_logits(batch, self._kv, self._logits[:num])
        ids, is_sound = self._draw(logits, inputs.next_positions_B, sampling)
        remember(ids, is_sound, sent_XB[0], last_ids_N, self._token_ids[:num])

    def _draw(
        self, logits_BV: torch.Tensor, positions_B: torch.Tensor, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if sampling is Sampling.CONTROLLED:
            return self._controls.draw(logits_BV, positions_B)
        draws = None
        if sampling is Sampling.TEMPERATURES:
            draws = self._draws.parts[0].first(len(positions_B))
        return draw_rows(logits_BV, positions_B, draws, workspace=self._workspace)


def _sampling(wanted: Wanted) -> Sampling:
    if wanted is None:
        return Sampling.GREEDY
    return Sampling.TEMPERATURES if isinstance(wanted, HostDraws) else Sampling.CONTROLLED


def _first(inputs: StepInputs, num: int) -> StepInputs:
    return StepInputs(
        inputs.token_ids_B[:num],
        inputs.positions_B[:num],
        inputs.next_positions_B[:num],
        inputs.seq_lens_B[:num],
        inputs.slots_gB[:, :num],
    )
