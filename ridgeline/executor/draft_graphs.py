"""How does a decode step with drafts run as one launch? From drafts to tokens, captured once for
each number of rows and of drafts.

Each of B rows computes its newest token and k drafts behind it; what comes out at each of these
Q = k + 1 places is drawn, and the row goes on with as many tokens as the drafts were right for,
and one more. All of that is on the device: how long a row is, the host learns with the result, and
may by then have sent the next step. Where rows are sampled in a way that is not captured, the
graph ends at the logits and torch does the rest, without waiting either.
Letters: B rows of a bucket, Q new tokens of each, T = B * Q, N rows there is room for, M blocks per
table row, g KV groups, V vocabulary, Y numbers of a row's answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from ridgeline.attention.layout import DecodeLayout, ForwardBatch
from ridgeline.devices import Device
from ridgeline.errors import InternalError
from ridgeline.executor.decode_graphs import BUCKETS
from ridgeline.executor.device_rows import DeviceDraws, DeviceTables
from ridgeline.executor.rows import PADDING_ROW, Rows
from ridgeline.executor.transfer import Array, Transfer
from ridgeline.formats import STEP_DRAFTS
from ridgeline.kernels.drafts import (
    History,
    accept,
    draft_inputs,
    enter_blocks,
    first_inputs,
    tell_found,
)
from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.step_inputs import StepInputs, make_step_inputs
from ridgeline.kernels.verified_rows import DraftOdds, verified_rows
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.request import record
from ridgeline.sampling.batch import HostDraws
from ridgeline.speculation.contract import DraftMethod, DraftStep
from ridgeline.speculation.synthetic import Synthetic, synthetic_ids

# Of an answer: tokens that came out, drafts there were, was the first right, those tokens; last,
# how many drafts lie behind them now.
BEFORE_IDS = 3


class Verification(Enum):
    """How the places of a captured step are drawn; with LOGITS they are not."""

    GREEDY = "greedy"
    TEMPERATURES = "temperatures"
    ODDS = "odds"
    LOGITS = "logits"


@dataclass(frozen=True, slots=True, eq=False)
class RowDraws:
    """How each row of a step is drawn at its places, and its drafts by a model: the same but for
    their keys. `by_odds_R` (bool) are rows whose drafts are checked by their odds."""

    places_R: HostDraws
    drafts_R: HostDraws
    by_odds_R: Array


@record
class VerifyStep:
    """What the host says of a step: `sent_XB` has each row's place among N, how many of its drafts
    count, and for each group its new block or -1 and where in the table that goes."""

    num_rows: int
    num_draft_tokens: int
    sent_XB: Array


@record
class Verified:
    """All of it is overwritten by the next step. `answer_RY` as the host wants it; None after a
    step that ended at the logits."""

    answer_RY: torch.Tensor | None
    logits_TV: torch.Tensor  # float32
    draft_logits_BkV: torch.Tensor | None
    token_ids_T: torch.Tensor  # that were computed: each row's newest token, then its drafts
    positions_T: torch.Tensor  # where the tokens that come out stand
    rows_R: torch.Tensor
    limits_R: torch.Tensor


Key = tuple[int, int, Verification]


class DraftGraphs:
    """The captured decode steps of an engine that drafts; k = 0 among them."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        rows: Rows,
        tables: DeviceTables,
        transfer: Transfer,
        device: Device,
        *,
        method: DraftMethod,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        self._decoder, self._kv, self._rows, self._tables = decoder, kv, rows, tables
        self._transfer, self._device, self._method = transfer, device, method
        self.buckets = [b for b in BUCKETS if b < max_rows]
        self.buckets.append(min(max_rows, BUCKETS[-1]))
        self.max_tokens = most = max(max_tokens, self.buckets[-1])
        where, num_groups = decoder.device, len(kv.groups)
        self._inputs = make_step_inputs(num_groups, most, where)
        self._sent = torch.zeros(
            (2 + 2 * num_groups) * self.buckets[-1], dtype=torch.int64, device=where
        )
        self._starts = [
            torch.arange(self.buckets[-1] + 1, dtype=torch.int32, device=where) * num_new
            for num_new in range(1, method.max_draft_tokens + 2)
        ]
        vocab_size = decoder.spec.vocab_size
        self._logits = torch.empty(most, vocab_size, dtype=torch.float32, device=where)
        width = most * (BEFORE_IDS + 2) + most
        self._answer = torch.zeros(width, dtype=torch.int64, device=where)
        rows_most = self.buckets[-1]
        self._draws = DeviceDraws([most, rows_most], transfer, where, num_flags=rows_most)
        self._drawn_for: tuple[RowDraws, int] | None = None
        self._workspace = make_workspace(where, 3 * most * (vocab_size // 4096 + 1), most)
        # States of the target that a draft head reads, of the last step.
        shape = len(method.taps), most if method.taps else 0, decoder.spec.hidden_size
        self._tapped = torch.empty(shape, dtype=decoder.dtype, device=where)
        self.has_odds = not (method.looks_ahead or isinstance(method, Synthetic))
        self.num_steps = 0
        self._graphs: dict[Key, tuple[Callable[[], None], torch.Tensor | None]] = {}
        self._seen: dict[tuple[int, Key], tuple[torch.Tensor, Verified]] = {}
        self._captured_tables: torch.Tensor | None = None

    # --------------------------------------------------------------------------- a step

    def most_drafts(self, num_rows: int) -> int:
        """That a captured step of so many rows has room for."""
        bucket = self.buckets[bisect_right(self.buckets, max(0, num_rows - 1))]
        return min(self._method.max_draft_tokens, self.max_tokens // bucket - 1)

    def captured_for(self, num_rows: int, wanted: int) -> int:
        """How many drafts a step of so many rows checks, where its rows have up to `wanted`. At
        the ends of answers that is any number, and to capture another one takes as long on a GPU
        as hundreds of steps: the next larger one of those that are usual."""
        most = self.most_drafts(num_rows)
        if wanted and self._decoder.device.type != "cpu":
            wanted = STEP_DRAFTS[bisect_left(STEP_DRAFTS, wanted)]
        return min(wanted, most)

    def prepare(self, bucket: int, num_draft_tokens: int, verification: Verification) -> bool:
        """Capture the steps of this size before one is asked for. False: they are. Nothing may be
        in flight."""
        self._follow()
        key = bucket, num_draft_tokens, verification
        if key in self._graphs:
            return False
        self._graphs[key] = self._capture(key)
        return True

    def run(
        self, step: VerifyStep, wanted: RowDraws | None, verification: Verification
    ) -> Verified:
        """Send the step off. `wanted`: rows at temperatures, None where all are greedy."""
        bucket, num_new = step.sent_XB.shape[1], step.num_draft_tokens + 1
        key = bucket, step.num_draft_tokens, verification
        self._follow()
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = self._capture(key)
        self._take_draws(wanted, num_new)
        replay, draft_logits = found
        seen = self._seen.get((step.num_rows, key))
        if seen is None:
            verified = self._verified(step.num_rows, key, draft_logits)
            seen = self._sent[: step.sent_XB.size], verified
            self._seen[step.num_rows, key] = seen
        sent, verified = seen
        self._transfer.send_into(step.sent_XB, sent)
        replay()
        self.num_steps += 1
        return verified

    def _verified(self, num: int, key: Key, draft_logits: torch.Tensor | None) -> Verified:
        """Where a step of `num` rows leaves what."""
        bucket, num_new, tokens = key[0], key[1] + 1, num * (key[1] + 1)
        sent_XB = self._sent[: (2 + 2 * len(self._kv.groups)) * bucket].view(-1, bucket)
        answer = None if key[2] is Verification.LOGITS else self._answer_of(bucket, num_new)[:num]
        return Verified(
            answer,
            self._logits[:tokens],
            None if draft_logits is None else draft_logits[:num],
            self._inputs.token_ids_B[:tokens],
            self._inputs.next_positions_B[:tokens],
            sent_XB[0, :num],
            sent_XB[1, :num],
        )

    def finish(
        self, verified: Verified, ids_T: torch.Tensor, is_sound_T: torch.Tensor
    ) -> torch.Tensor:
        """The rest of a step that ended at the logits; its answer [R, Y]."""
        num = len(verified.rows_R)
        answer = self._answer_of(num, len(ids_T) // num)
        self._accept(ids_T, is_sound_T, verified.rows_R, verified.limits_R, answer)
        self._take_states(verified.rows_R, len(ids_T) // num)
        return answer

    def add(
        self, rows_R: torch.Tensor, ids_R: torch.Tensor, is_sound_R: torch.Tensor
    ) -> torch.Tensor:
        """The same for rows that got one token by another step, of which there may be more than a
        captured step has; their answer."""
        if len(ids_R) > self.max_tokens:
            answer = ids_R.new_zeros(len(ids_R), BEFORE_IDS + 2)
        else:
            answer = self._answer_of(len(ids_R), 1)
        self._accept(ids_R, is_sound_R, rows_R, torch.zeros_like(rows_R), answer)
        return answer

    # -------------------------------------------------------------------------- capture

    @property
    def _history(self) -> History:
        history = self._rows.history
        if history is None:
            raise InternalError("drafts without a history")
        return history

    def _follow(self) -> None:
        """Forget what was captured over memory that is not used any more."""
        self._tables.follow()
        self._method.make_room(len(self._history.lens_N))
        if self._captured_tables is not self._tables.tables_gNM:
            self._captured_tables = self._tables.tables_gNM
            self._graphs.clear()
            self._seen.clear()

    def _take_draws(self, wanted: RowDraws | None, num_new: int) -> None:
        """Rows behind those are padding, however they are drawn."""
        if wanted is None or self._drawn_for == (wanted, num_new):
            return
        self._draws.put(0, wanted.places_R, num_new)
        self._draws.put(1, wanted.drafts_R)
        self._draws.put_flags(wanted.by_odds_R)
        self._draws.send()
        self._drawn_for = wanted, num_new

    def _answer_of(self, num_rows: int, num_new: int) -> torch.Tensor:
        width = BEFORE_IDS + num_new + 1
        return self._answer[: num_rows * width].view(num_rows, width)

    def _capture(self, key: Key) -> tuple[Callable[[], None], torch.Tensor | None]:
        """On padding alone, so that nobody's cache and nobody's history is touched."""
        bucket = key[0]
        sent_XB = self._sent[: (2 + 2 * len(self._kv.groups)) * bucket].view(-1, bucket)
        sent_XB[0] = PADDING_ROW
        sent_XB[1] = 0
        sent_XB[2:] = -1
        kept: list[torch.Tensor | None] = []
        replay = self._device.capture(lambda: kept.append(self._launch(sent_XB, *key[1:])))
        return replay, kept[-1]

    def _launch(
        self, sent_XB: torch.Tensor, k: int, verification: Verification
    ) -> torch.Tensor | None:
        rows_B, limits_B = sent_XB[0], sent_XB[1]
        num, num_new = len(rows_B), k + 1
        size, tables_gNM = self._kv.block_size, self._tables.tables_gNM
        draws = None
        if verification is not Verification.GREEDY:
            draws = self._draws.parts[1].first(num)
        enter_blocks(rows_B, sent_XB[2:], tables_gNM)
        step = DraftStep(rows_B, limits_B, self._history, tables_gNM, size, draws)
        draft_logits = self._method.draft(step, k) if k else None
        inputs = first_inputs(self._inputs, num, num_new)
        draft_inputs(
            rows_B, limits_B, self._history, tables_gNM, inputs, size,
            num_new=num_new, first=0, max_positions=self._decoder.max_model_len,
        )  # fmt: skip
        batch = self._batch(rows_B, num_new)
        logits_TV = self._logits[: num * num_new]
        if taps := self._method.taps:
            tapped_nTE = self._tapped[:, : num * num_new]
            hidden_TE = self._decoder.forward_tapped(batch, self._kv, taps, tapped_nTE)
            logits_TV.copy_(self._decoder.logits(hidden_TE))
        else:
            self._decoder.forward_logits(batch, self._kv, logits_TV)
        if verification is not Verification.LOGITS:
            ids, is_sound = self._draw(logits_TV, inputs, draft_logits, rows_B, verification)
            self._accept(ids, is_sound, rows_B, limits_B, self._answer_of(num, num_new))
            self._take_states(rows_B, num_new)
        return draft_logits

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

    def _take_states(self, rows_B: torch.Tensor, num_new: int) -> None:
        """Once the tokens that came out are in the history."""
        if self._method.taps:
            rows_T = rows_B[:, None].expand(-1, num_new).reshape(-1)
            tapped_nTE = self._tapped[:, : len(rows_T)]
            batch = self._batch(rows_B, num_new)
            self._method.take_states(tapped_nTE, batch, rows_T, self._history)

    def _draw(
        self,
        logits_TV: torch.Tensor,
        inputs: StepInputs,
        draft_logits_BkV: torch.Tensor | None,
        rows_B: torch.Tensor,
        verification: Verification,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        draws = odds = None
        num, positions_T = len(rows_B), inputs.next_positions_B
        if verification is not Verification.GREEDY:
            draws = self._draws.parts[0].first(len(logits_TV))
        if verification is Verification.ODDS and draft_logits_BkV is not None:
            drafts_Bk = inputs.token_ids_B.view(num, -1)[:, 1:]
            odds = DraftOdds(drafts_Bk, draft_logits_BkV, self._draws.flags_B[:num])
        ids_T, is_sound_T = verified_rows(
            logits_TV, positions_T, draws, odds, workspace=self._workspace
        )
        if isinstance(self._method, Synthetic):
            num_new = len(ids_T) // num
            keys_T = rows_B[:, None].expand(num, num_new).reshape(-1)
            drafts_T = inputs.token_ids_B.roll(-1)
            ids_T = synthetic_ids(ids_T, drafts_T, keys_T, positions_T, self._method.rate)
        return ids_T, is_sound_T

    def _accept(
        self,
        ids_T: torch.Tensor,
        is_sound_T: torch.Tensor,
        rows_B: torch.Tensor,
        limits_B: torch.Tensor,
        answer_BY: torch.Tensor,
    ) -> None:
        history, size = self._history, self._kv.block_size
        accept(ids_T, is_sound_T, rows_B, limits_B, history, answer_BY[:, :-1])
        if self._method.looks_ahead:
            tables = self._tables.tables_gNM
            step = DraftStep(rows_B, limits_B, history, tables, size, None)
            self._method.look_ahead(step)
            tell_found(rows_B, history, answer_BY[:, -1])
