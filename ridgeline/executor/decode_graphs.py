"""How does a whole decode step run as one launch? Captured once for each size, replayed ever after.

A graph holds everything from tokens to tokens: the inputs of the step (from the rows' last tokens
and tables, which stay on the device), all layers, the output matrix and the draw. The host sends
which rows the step is for, where they stand and which blocks are new; nothing it does grows with
the model. Sizes are rounded up to buckets; padding rows are those of row 0, which nobody has and
whose table leads to the null block.
Letters: B rows of a bucket, N rows there is room for, M blocks per table row, g KV groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ridgeline.attention import CapturedBackend
from ridgeline.attention.layout import DecodeLayout, ForwardBatch
from ridgeline.devices import Device
from ridgeline.executor.device_tables import DeviceTables
from ridgeline.executor.rows import PADDING_ROW, Rows
from ridgeline.executor.transfer import Array, Transfer
from ridgeline.kernels.draw_rows import Draws, draw_rows
from ridgeline.kernels.step_inputs import StepInputs, make_step_inputs, step_inputs
from ridgeline.kernels.workspace import make_workspace
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.feed_forward import FeedForward

# A row of padding costs little as long as weights are what takes the time.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def why_not_captured(decoder: Decoder, kv: KVCache) -> str | None:
    """The first reason against captured steps, None when there is none."""
    if decoder.device.type != "cuda":
        return "graphs are for CUDA devices"
    if not isinstance(decoder.backend, CapturedBackend):
        return f"attention backend {decoder.backend.name} cannot be captured"
    if kv.layers[0].views is None:
        return f"KV format {kv.format.name} is not written in place"
    if decoder.placement.size > 1:
        return "the model is spread over several devices"
    if not all(isinstance(layer.feed_forward, FeedForward) for layer in decoder.layers):
        return "the host must know which experts a step needs"
    return None


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """What the host says of one decode step: `sent_XB` as `step_inputs` wants it, padded."""

    num_rows: int
    sent_XB: Array


@dataclass(frozen=True, slots=True)
class Drawn:
    """`token_ids_R` is -1 for rows without a finite logit; all are overwritten by the next step."""

    token_ids_R: torch.Tensor
    logits_RV: torch.Tensor  # in the serving dtype
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
        self._logits = torch.empty(most, vocab_size, dtype=decoder.dtype, device=where)
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=where)
        self._draws = Draws(
            torch.zeros(most, dtype=torch.int64, device=where),
            torch.ones(most, device=where),
            torch.zeros(most, device=where),
        )
        self._drawn_for: Draws | None = None
        self._workspace = make_workspace(where, 3 * most * (vocab_size // 4096 + 1), most)
        self.num_steps = 0
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}

    # --------------------------------------------------------------------------- a step

    def run(self, step: CapturedStep, draws: Draws | None) -> Drawn:
        """Send the step off; `draws` None: all rows are greedy. The rows remember their tokens."""
        if self._tables.follow():
            self._graphs.clear()
        bucket, is_random = step.sent_XB.shape[1], draws is not None
        if draws is not None and draws is not self._drawn_for:
            self._take_draws(draws)
        replay = self._graphs.get((bucket, is_random))
        if replay is None:
            replay = self._graphs[bucket, is_random] = self._capture(bucket, is_random)
        self._transfer.send_into(step.sent_XB, self._sent[: step.sent_XB.size])
        replay()
        self.num_steps += 1
        num = step.num_rows
        positions_R = self._inputs.next_positions_B[:num]
        return Drawn(self._token_ids[:num], self._logits[:num], positions_R)

    def _take_draws(self, draws: Draws) -> None:
        num = len(draws.keys_R)
        self._draws.keys_R[:num].copy_(draws.keys_R)
        self._draws.temperatures_R[:num].copy_(draws.temperatures_R)
        self._draws.noisy_R[:num].copy_(draws.noisy_R)
        self._drawn_for = draws

    # -------------------------------------------------------------------------- capture

    def _capture(self, bucket: int, is_random: bool) -> Callable[[], None]:
        """On padding alone, so that nobody's cache is touched."""
        sent_XB = self._sent[: (2 + len(self._kv.groups)) * bucket].view(-1, bucket)
        sent_XB[:2] = PADDING_ROW
        sent_XB[2:] = -1
        return self._device.capture(partial(self._launch, sent_XB, is_random))

    def _launch(self, sent_XB: torch.Tensor, is_random: bool) -> None:
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
        draws = None
        if is_random:
            d = self._draws
            draws = Draws(d.keys_R[:num], d.temperatures_R[:num], d.noisy_R[:num])
        ids, is_sound = draw_rows(logits, inputs.next_positions_B, draws, workspace=self._workspace)
        last_ids_N.index_copy_(0, sent_XB[0], ids)
        self._token_ids[:num].copy_(ids.where(is_sound, -1))


def _first(inputs: StepInputs, num: int) -> StepInputs:
    return StepInputs(
        inputs.token_ids_B[:num],
        inputs.positions_B[:num],
        inputs.next_positions_B[:num],
        inputs.seq_lens_B[:num],
        inputs.slots_gB[:, :num],
    )
