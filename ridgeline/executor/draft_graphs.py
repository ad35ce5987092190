"""How does a decode step with drafts run as one launch? From drafts to tokens, captured once for
each number of rows and of drafts.

Each of B rows computes its newest token and k drafts behind it; what comes out at each of these
Q = k + 1 places is drawn, and the row goes on with as many tokens as the drafts were right for,
and one more. All of that is on the device: how long a row is, the host learns with the result, and
may by then have sent the next step. Where rows are sampled in a way that is not captured, the
graph ends at the logits and torch does the rest, without waiting either.
Letters: B rows of a bucket, Q new tokens of each, T = B * Q, Y numbers of a row's answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

import torch

from ridgeline.attention.layout import ForwardBatch
from ridgeline.errors import InternalError
from ridgeline.executor.decode_graphs import (
    BEFORE_IDS,
    CapturedOutput,
    DecodeGraphs,
    ExecutorParts,
    Sampling,
    StepKey,
)
from ridgeline.formats import STEP_DRAFTS
from ridgeline.kernels.drafts import History, accept, draft_inputs, enter_blocks, tell_found
from ridgeline.kernels.step_inputs import StepInputs
from ridgeline.kernels.verified_rows import DraftOdds, verified_rows
from ridgeline.speculation.contract import DraftMethod, DraftStep
from ridgeline.speculation.synthetic import Synthetic, synthetic_ids


class DraftGraphs(DecodeGraphs):
    """The captured decode steps of an engine that drafts; k = 0 among them. Of `sent_XB`, line 1
    is how many of a row's drafts count."""

    # A new block or -1, and where in the row's table it goes.
    lines_per_group = 2

    def __init__(
        self, shared: ExecutorParts, *, method: DraftMethod, max_rows: int, max_tokens: int
    ) -> None:
        most = method.max_draft_tokens
        super().__init__(shared, max_rows=max_rows, max_tokens=max_tokens, max_draft_tokens=most)
        self._method = method
        # States of the target that a draft head reads, of the last step.
        shape = len(method.taps), self.max_tokens if method.taps else 0
        self._tapped = torch.empty(
            *shape,
            self._decoder.spec.hidden_size,
            dtype=self._decoder.dtype,
            device=self._decoder.device,
        )
        self.has_odds = not (method.looks_ahead or isinstance(method, Synthetic))
        self.samples_controlled = False
        self._draft_logits: dict[StepKey, torch.Tensor | None] = {}

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

    def _output(self, num: int, key: StepKey) -> CapturedOutput:
        output, draft_logits = super()._output(num, key), self._draft_logits.get(key)
        if draft_logits is None:
            return output
        return replace(output, draft_logits_BkV=draft_logits[:num])

    def finish(
        self, output: CapturedOutput, ids_T: torch.Tensor, is_sound_T: torch.Tensor
    ) -> torch.Tensor:
        """The rest of a step that ended at the logits; what it tells [R, Y]."""
        num = output.sent_XR.shape[1]
        answers = self._answers_of(num, len(ids_T) // num)
        self._end(ids_T, is_sound_T, output.sent_XR, answers)
        return answers

    def add(
        self, rows_R: torch.Tensor, ids_R: torch.Tensor, is_sound_R: torch.Tensor
    ) -> torch.Tensor:
        """The same for rows that got one token by another step, of which there may be more than a
        captured step has."""
        if len(ids_R) > self.max_tokens:
            answers = ids_R.new_zeros(len(ids_R), BEFORE_IDS + 2)
        else:
            answers = self._answers_of(len(ids_R), 1)
        self._accept(ids_R, is_sound_R, rows_R, torch.zeros_like(rows_R), answers)
        return answers

    # -------------------------------------------------------------------------- capture

    @property
    def _history(self) -> History:
        history = self._rows.history
        if history is None:
            raise InternalError("drafts without a history")
        return history

    def _follow(self, key: StepKey) -> None:
        self._method.make_room(len(self._history.lens_N))
        super()._follow(key)

    def _answers_of(self, num_rows: int, num_new: int) -> torch.Tensor:
        width = BEFORE_IDS + num_new + 1
        return self._answers[: num_rows * width].view(num_rows, width)

    def _begin(self, key: StepKey, sent_XB: torch.Tensor, inputs: StepInputs) -> None:
        rows_B, limits_B, k = sent_XB[0], sent_XB[1], key[1]
        size, tables_gNM = self._kv.block_size, self._tables.tables_gNM
        draws = None
        if key[2] is not Sampling.GREEDY:
            draws = self._draws.parts[1].first(len(rows_B))
        enter_blocks(rows_B, sent_XB[2:], tables_gNM)
        step = DraftStep(rows_B, limits_B, self._history, tables_gNM, size, draws)
        self._draft_logits[key] = self._method.draft(step, k) if k else None
        draft_inputs(
            rows_B, limits_B, self._history, tables_gNM, inputs, size,
            num_new=k + 1, first=0, max_positions=self._decoder.max_model_len,
        )  # fmt: skip

    def _forward(self, batch: ForwardBatch, logits_TV: torch.Tensor) -> None:
        if not (taps := self._method.taps):
            return super()._forward(batch, logits_TV)
        tapped_nTE = self._tapped[:, : len(logits_TV)]
        hidden_TE = self._decoder.forward_tapped(batch, self._kv, taps, tapped_nTE)
        logits_TV.copy_(self._decoder.logits(hidden_TE))
        return None

    def _draw(
        self, key: StepKey, logits_TV: torch.Tensor, inputs: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num, positions_T = key[0], inputs.next_positions_B
        odds, draft_logits_BkV = None, self._draft_logits[key]
        if key[2] is Sampling.ODDS and draft_logits_BkV is not None:
            drafts_Bk = inputs.token_ids_B.view(num, -1)[:, 1:]
            odds = DraftOdds(drafts_Bk, draft_logits_BkV, self._draws.flags_B[:num])
        ids_T, is_sound_T = verified_rows(
            logits_TV, positions_T, self._place_draws(key), odds, workspace=self._workspace
        )
        if isinstance(self._method, Synthetic):
            rows_B = self._sent_of(num)[0]
            keys_T = rows_B[:, None].expand(num, key[1] + 1).reshape(-1)
            drafts_T = inputs.token_ids_B.roll(-1)
            ids_T = synthetic_ids(ids_T, drafts_T, keys_T, positions_T, self._method.rate)
        return ids_T, is_sound_T

    def _end(
        self,
        ids_T: torch.Tensor,
        is_sound_T: torch.Tensor,
        sent_XB: torch.Tensor,
        answers: torch.Tensor,
    ) -> None:
        rows_B, limits_B = sent_XB[0], sent_XB[1]
        self._accept(ids_T, is_sound_T, rows_B, limits_B, answers)
        if self._method.taps:  # once the tokens that came out are in the history
            num_new = len(ids_T) // len(rows_B)
            rows_T = rows_B[:, None].expand(-1, num_new).reshape(-1)
            tapped_nTE, batch = self._tapped[:, : len(ids_T)], self._batch(rows_B, num_new)
            self._method.take_states(tapped_nTE, batch, rows_T, self._history)

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
