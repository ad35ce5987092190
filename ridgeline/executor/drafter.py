"""How does an executor draft and check? A draft method, its captured steps, and what is sampled
otherwise.

Letters: R rows that sample, T = R * Q tokens, Q new tokens of each row, V vocabulary, L rows that
want log-probabilities, Y numbers of a row's answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ridgeline.attention.layout import ForwardBatch
from ridgeline.executor.decode_graphs import BEFORE_IDS, CapturedOutput, ExecutorParts, Sampling
from ridgeline.executor.draft_batch import DraftBatch, DraftBatchBuilder
from ridgeline.executor.draft_graphs import DraftGraphs
from ridgeline.executor.future import Answers
from ridgeline.executor.grammar_masks import GrammarMasks
from ridgeline.executor.mixed_graphs import MixedStep
from ridgeline.sampling.batch import LogprobRows
from ridgeline.sampling.row import Needs
from ridgeline.speculation.contract import DraftMethod
from ridgeline.speculation.verify import VerifiedRun, verify_run
from ridgeline.step import StepPlan


@dataclass(frozen=True, slots=True)
class Drafting:
    """What an executor is told: who drafts, and how many tokens a captured step may check."""

    method: DraftMethod
    max_verified_tokens: int


class DraftRunner:
    def __init__(
        self,
        shared: ExecutorParts,
        *,
        method: DraftMethod,
        max_rows: int,
        max_tokens: int,
        block_size: int,
    ) -> None:
        self.method = method
        self._rows, self._transfer = shared.rows, shared.transfer
        self._decoder, self._kv = shared.decoder, shared.kv
        self._untaken: tuple[torch.Tensor, ForwardBatch, torch.Tensor] | None = None
        self._vocab_size = self._decoder.spec.vocab_size
        self._always = not method.looks_ahead
        self._is_on_host = self._decoder.device.type == "cpu"
        self.graphs = DraftGraphs(shared, method=method, max_rows=max_rows, max_tokens=max_tokens)
        self.builder = DraftBatchBuilder(
            self._rows,
            block_size,
            self._vocab_size,
            self._transfer,
            self.graphs,
            needs_tokens=method.needs_tokens,
            max_draft_tokens=method.max_draft_tokens,
        )

    def follow(self, step: MixedStep) -> None:
        """Tokens that are computed without drafts."""
        if self.method.needs_tokens:
            self.method.follow(self.builder.send(step))

    def forward(self, step: MixedStep) -> torch.Tensor:
        """Hidden states of a step that drafts nothing, as `LocalExecutor._forward` has them, for a
        method that reads the target's; behind it, `take_states`."""
        batch, taps, spec = self.builder.send(step), self.method.taps, self._decoder.spec
        whole = replace(batch, logits_indices=None)
        shape = len(taps), len(step.token_ids_T), spec.hidden_size
        tapped_nTE = torch.empty(shape, dtype=self._decoder.dtype, device=self._decoder.device)
        hidden_TE = self._decoder.forward_tapped(whole, self._kv, taps, tapped_nTE)
        rows_T = self._transfer.send(np.repeat(step.rows_B, step.num_new_B))
        self._untaken = tapped_nTE, whole, rows_T
        at = batch.logits_indices
        return hidden_TE if at is None else hidden_TE.index_select(0, at.rows_R)

    def take_states(self) -> None:
        """The tokens of the last `forward` have been sampled."""
        if (untaken := self._untaken) is not None and (history := self._rows.history) is not None:
            self._untaken = None
            self.method.make_room(len(history.lens_N))
            self.method.take_states(*untaken, history)

    def run(self, batch: DraftBatch, grammars: GrammarMasks) -> tuple[torch.Tensor, CapturedOutput]:
        """One step: each row's answer [R, Y], which the next step overwrites."""
        if batch.missed is not None:
            self.method.follow(batch.missed)
        rows, num_draft_tokens = batch.rows, batch.step.num_draft_tokens
        sampling = rows.kept.batch
        is_drawn = sampling.is_drawn_at(batch.least_positions)
        if is_drawn and sampling.filters is None:
            verified = self.graphs.run(batch.step, None, Sampling.GREEDY)
        else:
            needs_odds = num_draft_tokens > 0 and rows.has_odds and self.graphs.has_odds
            drawn = Sampling.ODDS if needs_odds else Sampling.TEMPERATURES
            verified = self.graphs.run(
                batch.step, rows.draws, drawn if is_drawn else Sampling.LOGITS
            )
        answer_RY = verified.answers
        if answer_RY is None:
            ids_T, is_sound_T = self._drawn(batch, verified, grammars)
            answer_RY = self.graphs.finish(verified, ids_T, is_sound_T)
        kept = rows.kept
        if kept.counts_rows_C is not None and kept.counts_slots_C is not None:
            ids_CQ = answer_RY[kept.counts_rows_C, BEFORE_IDS:-1]
            self._rows.counts.add_run(kept.counts_slots_C, ids_CQ)
        return answer_RY, verified

    def _drawn(
        self, batch: DraftBatch, verified: CapturedOutput, grammars: GrammarMasks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out at each place, by torch: whatever the rows ask for."""
        num_draft_tokens = batch.step.num_draft_tokens
        rows = batch.rows.run_of(num_draft_tokens, self._vocab_size, self._transfer)
        drafts_T = verified.token_ids_T.roll(-1)
        allowed_RV, kept = None, batch.rows.kept
        if kept.batch.needs & Needs.GRAMMAR:
            drafts_Rk = verified.token_ids_T.view(len(kept.rows), -1)[:, 1:].cpu().numpy()
            device = verified.logits_TV.device
            allowed_RV = grammars.allowed_run(kept.request_ids, drafts_Rk, batch.limits, device)
        draft_logits = verified.draft_logits_BkV
        run = VerifiedRun(rows, verified.positions_T, drafts_T, draft_logits, allowed_RV)
        sampled = verify_run(verified.logits_TV, run, self._rows.counts)
        return sampled.token_ids_R, sampled.is_sound_R

    def answers(self, answer_RY: torch.Tensor, limits: list[int]) -> Answers:
        """The same on its way to the host."""
        always = self._always
        if self._is_on_host:
            return Answers(answer_RY.tolist(), limits, always)
        return Answers(self._transfer.fetch(answer_RY, is_kept=False), limits, always)

    def flying(self, plan: StepPlan) -> Callable[[], None] | None:
        """A step was sent off; to be called when it is over, unless None. As long as one whose
        drafts may all be right is in flight, the host knows only how long its rows may be."""
        if plan.decodes is not None or not any(entry.num_draft for entry in plan.scheduled):
            return None
        builder = self.builder
        builder.num_unsure += 1

        def landed() -> None:
            builder.num_unsure -= 1

        return landed


def repeated(wanted: LogprobRows, num_new: int) -> LogprobRows:
    """For all places of these rows."""
    place_Q = torch.arange(num_new, device=wanted.rows_L.device)
    rows_LQ = wanted.rows_L[:, None] * num_new + place_Q
    each = range(num_new)
    return LogprobRows(
        tuple(row * num_new + i for row in wanted.rows for i in each),
        tuple(top_k for top_k in wanted.top_ks for _ in each),
        rows_LQ.reshape(-1),
    )
