"""How is a step run on the device of this process?

A plan's rows are opened and closed on the host, one batch is built and sent, the decoder runs, and
the rows that are due get a token. Nothing in `submit` waits for a GPU; `result()` of the future
does. Letters: T packed tokens of the step, E hidden, R rows that sample, V vocabulary, Y numbers
of a row's answer.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

import numpy as np
import torch

from ridgeline.architectures.kv_groups import KVGroup
from ridgeline.attention.layout import ForwardBatch
from ridgeline.devices import Device
from ridgeline.errors import EngineFault, InternalError, check
from ridgeline.executor.batch import (
    BatchBuilder,
    CapturedBatch,
    RowMissing,
    SamplingStep,
    StepBatch,
)
from ridgeline.executor.batch_invariant import InvariantSampler, PieceBuilder, invariant_logprobs
from ridgeline.executor.decode_graphs import BEFORE_IDS, DecodeGraphs, ExecutorParts, Sampling
from ridgeline.executor.device_rows import DeviceTables
from ridgeline.executor.draft_batch import DraftBatch
from ridgeline.executor.drafter import Drafting, DraftRunner, repeated
from ridgeline.executor.future import Answers, Failed, Pending, SampledLogprobs
from ridgeline.executor.grammar_masks import GrammarMasks
from ridgeline.executor.mixed_graphs import MixedGraphs, MixedStep
from ridgeline.executor.prompt_logprobs import CHUNK_BYTES, PromptLogprobs, prompt_logprobs
from ridgeline.executor.rows import FIRST_ROWS, Rows
from ridgeline.executor.transfer import transfer_to
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import ExpertLoad, Experts
from ridgeline.log import say
from ridgeline.sampling.batch import LogprobRows
from ridgeline.sampling.logprobs import LogprobTensors, token_logprobs
from ridgeline.sampling.penalties import FIRST_COUNTS
from ridgeline.sampling.row import Needs
from ridgeline.sampling.sampler import sample
from ridgeline.step import BlockCopy, StepFuture, StepPlan

logger = logging.getLogger(__name__)

_MAX_CAUSE = 200  # characters of an error's first line


# Token ids, on their way to the host.
Answered = tuple[torch.Tensor | Answers, SampledLogprobs | None]


class RowLost(Exception):
    """A step needs a row that went with an earlier fault."""


class LocalExecutor:
    """Runs the plans of one engine on one device, in the order they are submitted.

    A step that fails takes the rows of its requests with it; steps already planned for those fail
    too, and all others go on. `deterministic`, over a decoder that is: what a request gets does
    not depend on the others; its decodes are captured as prompts are. With `drafting` tokens are
    drafted, and as many of them checked as a plan says.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        device: Device,
        *,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVGroup],
        vocab_size: int,
        max_model_len: int,
        logits_chunk_bytes: int = CHUNK_BYTES,
        max_captured_rows: int = 0,
        max_captured_tokens: int = 0,
        deterministic: bool = False,
        drafting: Drafting | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_groups = len(groups)
        self.max_model_len = max_model_len
        self._decoder = decoder
        experts = [x.feed_forward for x in decoder.layers if isinstance(x.feed_forward, Experts)]
        self.experts, self.expert_load = experts, ExpertLoad(experts, decoder.device)
        self._kv = kv
        self._transfer = transfer_to(device.torch_device)
        most_drafts = 0 if drafting is None else drafting.method.max_draft_tokens
        self._rows = Rows(
            len(groups),
            block_size,
            max_model_len,
            vocab_size,
            self._transfer,
            first_rows=max(FIRST_ROWS, 1 << max_captured_rows.bit_length()),
            # All at once: captured steps are of no use any more when the counts move.
            first_counts=max(FIRST_COUNTS, 1 << (max_captured_rows - 1).bit_length()),
            max_draft_tokens=most_drafts,
        )
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        tables = DeviceTables(
            self._rows,
            self._transfer,
            len(groups),
            -(-(max_model_len + most_drafts) // block_size),
            device.torch_device,
        )
        shared = ExecutorParts(decoder, kv, self._rows, tables, self._transfer, device)
        if max_captured_rows and not deterministic and drafting is None:
            self._graphs = DecodeGraphs(shared, max_rows=max_captured_rows)
        if max_captured_tokens:
            self._mixed = MixedGraphs(
                shared, max_tokens=max_captured_tokens, all_pieces=deterministic
            )
        self._invariant = InvariantSampler(vocab_size, self._transfer) if deterministic else None
        self._builder = (PieceBuilder if deterministic else BatchBuilder)(
            self._rows,
            block_size,
            vocab_size,
            self._transfer,
            self._graphs.buckets if self._graphs else (),
        )
        self._drafter: DraftRunner | None = None
        if drafting is not None:
            check(max_captured_rows > 0 and not deterministic, "drafts need captured steps")
            self._drafter = DraftRunner(
                shared,
                method=drafting.method,
                max_rows=max_captured_rows,
                max_tokens=drafting.max_verified_tokens,
                block_size=block_size,
            )
            self._builder = self._drafter.builder
        most = max(1, logits_chunk_bytes // (4 * vocab_size))
        self._max_logit_rows = 1 if deterministic else most
        self._lost: set[str] = set()
        ranks = decoder.placement
        self.grammars = GrammarMasks(vocab_size, self._transfer, ranks.collective, ranks.rank)

    def submit(self, plan: StepPlan) -> StepFuture:
        """Send the step off. A plan that breaks its promises raises InternalError here; what
        goes wrong on the device is raised by the future as EngineFault."""
        for request_id in plan.preempted:
            self._close(request_id)
        for request_id in plan.finished:
            self._close(request_id)
        try:
            with torch.inference_mode():
                return self._run(plan)
        except InternalError:
            raise
        except Exception as error:
            return Failed(str(self._fault(plan, error)))

    def exchange_experts(self, at: int, pairs: Sequence[tuple[int, int]]) -> bool:
        """Pairs of experts of the layer of this place among those with experts change ranks,
        behind all steps that were submitted. False: they cannot, and none has moved."""
        with torch.inference_mode():
            moved = [self.experts[at].exchange(*pair) for pair in pairs]
        return all(moved)

    @property
    def decode_graphs(self) -> DecodeGraphs | None:
        return self._graphs

    @property
    def mixed_graphs(self) -> MixedGraphs | None:
        return self._mixed

    @property
    def drafter(self) -> DraftRunner | None:
        return self._drafter

    @property
    def most_captured_rows(self) -> int:
        """Of a decode step; 0: none is captured."""
        every = self._graphs, None if self._drafter is None else self._drafter.graphs
        return max((graphs.buckets[-1] for graphs in every if graphs is not None), default=0)

    @property
    def num_captured_steps(self) -> int:
        """Decodes, and others."""
        drafted = None if self._drafter is None else self._drafter.graphs
        every = self._graphs, self._mixed, drafted
        return sum(graphs.num_steps for graphs in every if graphs is not None)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    # ------------------------------------------------------------------------------ one step

    def _run(self, plan: StepPlan) -> StepFuture:
        for new in plan.new:
            self._rows.open(new)
            self._lost.discard(new.request_id)
            if new.sampling.structured_outputs:
                self.grammars.open(new)
        if plan.copies:
            self._copy(plan.copies)
        if not plan.scheduled:
            return self._pending(plan, [], None, None)
        step = self._build(plan)
        if self.grammars.rows:
            self.grammars.begin([entry.request_id for entry in plan.scheduled if entry.samples])
        if isinstance(step, CapturedBatch):
            return self._replay(plan, step)
        if isinstance(step, DraftBatch):
            return self._draft(plan, step)
        hidden_TE = self._forward(step.forward)
        sampling = self._builder.sampling(step)
        prompt = None
        if step.has_prompts:
            prompt = prompt_logprobs(
                step, hidden_TE, self._decoder, self._transfer, self._max_logit_rows
            )
        names: list[str] = []
        answer = None
        if sampling is not None:
            names, answer = sampling.kept.request_ids, self._answer(sampling, hidden_TE)
        if self._drafter is not None:
            self._drafter.take_states()
        return self._pending(plan, names, answer, prompt)

    def _answer(self, sampling: SamplingStep, hidden_TE: torch.Tensor) -> Answered | None:
        """The tokens of the rows that are due; None: nobody here will ask for them."""
        places = sampling.places_R
        hidden_RE = hidden_TE if places is None else hidden_TE.index_select(0, places)
        return self._sample(sampling, self._decoder.logits(hidden_RE))

    def _forward(self, step: ForwardBatch | MixedStep) -> torch.Tensor:
        """Hidden states of the step's tokens, [T, E], or of those at its logits indices; the next
        step may overwrite them."""
        if isinstance(step, ForwardBatch):
            return self._decoder.forward(step, self._kv)
        if self._drafter is not None:
            if self._drafter.method.taps:
                return self._drafter.forward(step)
            self._drafter.follow(step)
        hidden_TE = None if self._mixed is None else self._mixed.run(step)
        if hidden_TE is None:
            hidden_TE = self._decoder.forward(self._builder.send(step), self._kv)
        return hidden_TE

    def _replay(self, plan: StepPlan, batch: CapturedBatch) -> StepFuture:
        """One captured step. Rows whose sampling it does not do, or with more biases and bans than
        it has room for, are sampled once more, from its logits."""
        if (graphs := self._graphs) is None:
            raise InternalError("a captured step without graphs")
        kept = batch.kept
        if kept.batch.is_drawn_at(batch.host_positions):
            sampling = Sampling.GREEDY if kept.draws is None else Sampling.TEMPERATURES
            drawn = graphs.run(batch.step, kept.draws, sampling)
        elif graphs.samples_controlled and kept.is_controlled:
            drawn = graphs.run(batch.step, kept.controls, Sampling.CONTROLLED)
        else:
            drawn = graphs.run(batch.step, None, Sampling.GREEDY)
            step = SamplingStep(kept, None, drawn.positions_T, batch.host_positions)
            answer = self._sample(step, drawn.logits_TV)
            return self._pending(plan, kept.request_ids, answer, None)
        if (ids_R := drawn.answers) is None:
            raise InternalError("a captured step without tokens")
        logprobs = None
        if (wanted := kept.batch.logprobs) is not None:
            logprobs = self._fetch_logprobs(drawn.logits_TV, ids_R.clamp(min=0), wanted)
        answer = self._transfer.fetch(ids_R, is_kept=False), logprobs
        return self._pending(plan, kept.request_ids, answer, None)

    def _draft(self, plan: StepPlan, batch: DraftBatch) -> StepFuture:
        """A captured step with drafts, or of an engine that drafts."""
        if (drafter := self._drafter) is None:
            raise InternalError("drafts of an engine without them")
        answer_RY, verified = drafter.run(batch, self.grammars)
        kept, logprobs = batch.rows.kept, None
        if (wanted := kept.batch.logprobs) is not None:
            num_new = batch.step.num_draft_tokens + 1
            ids_T = answer_RY[:, BEFORE_IDS : BEFORE_IDS + num_new].clamp(min=0).reshape(-1)
            there = self._logprobs(verified.logits_TV, ids_T, repeated(wanted, num_new))
            fetched = there.each(self._transfer.fetch)
            logprobs = SampledLogprobs(wanted.rows, wanted.top_ks, fetched)
        answers = drafter.answers(answer_RY, batch.limits)
        return self._pending(plan, kept.request_ids, (answers, logprobs), None)

    def _build(self, plan: StepPlan) -> StepBatch | CapturedBatch | DraftBatch:
        try:
            if self._drafter is not None:
                return self._drafter.builder.build_step(plan)
            return self._builder.build(plan.scheduled)
        except RowMissing as missing:
            check(missing.args[0] in self._lost, "no row", request=missing.args[0])
            raise RowLost("it needs a request that an earlier failed step has lost") from None

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Block copies in order; those that do not build on each other go together."""
        sources: list[int] = []
        targets: list[int] = []
        for copy in copies:
            if copy.request_id not in self._lost:
                self._rows.replace_block(copy)
            if copy.source in targets or copy.target in sources or copy.target in targets:
                self._copy_blocks(sources, targets)
                sources, targets = [], []
            sources.append(copy.source)
            targets.append(copy.target)
        self._copy_blocks(sources, targets)

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        ids = self._transfer.send(np.array([sources, targets], np.int64))
        self._kv.copy_blocks(ids[0], ids[1])
        if self._drafter is not None:
            self._drafter.method.copy_blocks(ids[0], ids[1])

    def _sample(self, sampling: SamplingStep, logits_RV: torch.Tensor) -> Answered:
        """Tokens of the rows that are due, -1 where logits were not finite; the rows remember
        theirs on the device."""
        counts, kept, positions_R = self._rows.counts, sampling.kept, sampling.positions_R
        allowed_RV, host_positions = None, sampling.host_positions
        if kept.batch.needs & Needs.GRAMMAR:
            allowed_RV = self.grammars.allowed(len(kept.rows), logits_RV.device)
        if self._invariant is not None:
            left_RV = logits_RV if allowed_RV is None else logits_RV.where(allowed_RV, -torch.inf)
            sampled = self._invariant.sample(sampling, left_RV, counts)
        else:
            sampled = sample(
                logits_RV, kept.batch, positions_R, host_positions, counts, allowed_RV=allowed_RV
            )
        ids_R = sampled.token_ids_R
        self._rows.last_ids_N.index_copy_(0, kept.slots_R, ids_R)
        if kept.counts_rows_C is not None and kept.counts_slots_C is not None:
            counts.add(kept.counts_slots_C, ids_R[kept.counts_rows_C])
        logprobs = None
        if (wanted := kept.batch.logprobs) is not None:
            logprobs = self._fetch_logprobs(logits_RV, ids_R, wanted)
        if self._drafter is not None:
            answer_RY = self._drafter.graphs.add(kept.slots_R, ids_R, sampled.is_sound_R)
            return self._drafter.answers(answer_RY, [0] * len(ids_R)), logprobs
        return self._transfer.fetch(ids_R.where(sampled.is_sound_R, -1)), logprobs

    def _fetch_logprobs(
        self, logits_RV: torch.Tensor, ids_R: torch.Tensor, wanted: LogprobRows
    ) -> SampledLogprobs:
        there = self._logprobs(logits_RV, ids_R, wanted)
        return SampledLogprobs(wanted.rows, wanted.top_ks, there.each(self._transfer.fetch))

    def _logprobs(
        self, logits_RV: torch.Tensor, ids_R: torch.Tensor, wanted: LogprobRows
    ) -> LogprobTensors:
        if self._invariant is not None:
            return invariant_logprobs(logits_RV, ids_R, wanted)
        return token_logprobs(logits_RV, ids_R[wanted.rows_L], max(wanted.top_ks), wanted.rows_L)

    def _pending(
        self,
        plan: StepPlan,
        names: list[str],
        answer: Answered | None,
        prompt: PromptLogprobs | None,
    ) -> Pending:
        token_ids, logprobs = (None, None) if answer is None else answer
        landed = None if self._drafter is None else self._drafter.flying(plan)
        pending = Pending(
            names,
            token_ids,
            logprobs,
            prompt,
            self._transfer.mark(),
            lambda error: self._fault(plan, error),
            landed,
        )
        if self.grammars.rows:
            self.grammars.follow(names, pending)
        return pending

    # --------------------------------------------------------------------------------- faults

    def _close(self, request_id: str) -> None:
        self._rows.close(request_id)
        self._lost.discard(request_id)
        if self.grammars.rows:
            self.grammars.close(request_id)

    def _fault(self, plan: StepPlan, error: Exception) -> EngineFault:
        """The rows of this plan's requests are gone; says in one line what happened."""
        names = [entry.request_id for entry in plan.scheduled]
        names.extend(new.request_id for new in plan.new)
        for request_id in names:
            self._rows.close(request_id)
            self._lost.add(request_id)
            self.grammars.close(request_id)
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        cause = _cause(error)
        say(logger, logging.ERROR, "step failed", step=plan.step_id, cause=cause, where=where)
        error.__traceback__ = None  # its frames hold the step's tensors
        return EngineFault(f"step {plan.step_id} failed: {cause}")


def _cause(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:_MAX_CAUSE]
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in first:
        return (
            "out of device memory; lower max_num_batched_tokens or max_num_seqs, or leave the"
            " step more room with a lower memory_utilization or fewer num_blocks"
        )
    if isinstance(error, RowLost):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
