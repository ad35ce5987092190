"""How does one stage of a pipeline run a step? Hidden states come from the stage before and go to
the next; the last one samples, and sends the tokens back to the first.

The first stage needs a token when it computes what follows it. By the scheduler's rule that is
`stages` steps later, or when the host knows the token: until then it is not waited for. Letters: T
packed tokens of the step, E hidden, R rows that sample, L those that want log-probabilities.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ridgeline.attention.layout import ForwardBatch
from ridgeline.distributed.pipeline import Pipeline
from ridgeline.executor.batch import SamplingStep
from ridgeline.executor.future import Pending, SampledLogprobs
from ridgeline.executor.local import Answered, LocalExecutor
from ridgeline.executor.mixed_graphs import MixedStep
from ridgeline.executor.prompt_logprobs import PromptLogprobs
from ridgeline.sampling.logprobs import LogprobTensors
from ridgeline.step import StepFuture, StepPlan


class StageExecutor(LocalExecutor):
    """`decoder` and `kv` are those of the stage. No step is captured and nothing is drafted."""

    def __init__(self, *args: Any, pipeline: Pipeline, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._pipeline = pipeline
        self._step_id = 0
        # Of the first stage: steps whose tokens are still to come, and who samples last in which.
        self._awaited: deque[tuple[int, SamplingStep, Answered]] = deque()
        self._sampled_in: dict[str, int] = {}

    def _run(self, plan: StepPlan) -> StepFuture:
        self._step_id = plan.step_id
        if self._pipeline.is_first:
            for name in (*plan.preempted, *plan.finished):
                self._sampled_in.pop(name, None)
            needed = plan.step_id - self._pipeline.stages
            for entry in plan.scheduled:
                needed = max(needed, self._sampled_in.get(entry.request_id, 0))
            self._receive(needed)
        return super()._run(plan)

    def _forward(self, step: ForwardBatch | MixedStep) -> torch.Tensor:
        batch = step if isinstance(step, ForwardBatch) else self._builder.send(step)
        states_TE, decoder, pipeline = None, self._decoder, self._pipeline
        if not pipeline.is_first:
            shape = (len(batch.token_ids_T), decoder.spec.hidden_size)
            states_TE = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
            pipeline.take(states_TE)
        hidden_TE = decoder.forward_stage(batch, self._kv, states_TE)
        if not pipeline.is_last:
            pipeline.pass_on(self._step_id, hidden_TE)
        return hidden_TE

    def _answer(self, sampling: SamplingStep, hidden_TE: torch.Tensor) -> Answered | None:
        if self._pipeline.is_last:
            return super()._answer(sampling, hidden_TE)
        if not self._pipeline.is_first:
            return None
        answer = self._room_for(sampling)
        self._awaited.append((self._step_id, sampling, answer))
        for name in sampling.kept.request_ids:
            self._sampled_in[name] = self._step_id
        return answer

    def _sample(self, sampling: SamplingStep, logits_RV: torch.Tensor) -> Answered:
        answer = super()._sample(sampling, logits_RV)
        is_apart = self._decoder.device.type == "cuda"
        if is_apart:  # what is fetched is there only then, and not for long
            torch.cuda.current_stream(self._decoder.device).synchronize()
        for tensor in _tensors(answer):
            self._pipeline.give_back(self._step_id, tensor.clone() if is_apart else tensor)
        return answer

    def _room_for(self, sampling: SamplingStep) -> Answered:
        """As large as what the last stage will send, on the host."""
        wanted = sampling.kept.batch.logprobs
        ids_R = torch.empty(len(sampling.kept.rows), dtype=torch.int64)
        if wanted is None:
            return ids_R, None
        num = len(wanted.rows)
        top = num, min(max(wanted.top_ks), self._decoder.spec.vocab_size)
        tensors = LogprobTensors(
            torch.empty(num),
            torch.empty(num, dtype=torch.int64),
            torch.empty(top),
            torch.empty(top, dtype=torch.int64),
        )
        return ids_R, SampledLogprobs(wanted.rows, wanted.top_ks, tensors)

    @torch.inference_mode()
    def _receive(self, step_id: int) -> None:
        """All tokens of the steps up to this one."""
        while self._awaited and self._awaited[0][0] <= step_id:
            _, sampling, answer = self._awaited.popleft()
            for tensor in _tensors(answer):
                self._pipeline.take_back(tensor)
            ids_R = answer[0]
            if isinstance(ids_R, torch.Tensor):
                known_R = ids_R.clamp(min=0).to(self._decoder.device)
                self._rows.last_ids_N.index_copy_(0, sampling.kept.slots_R, known_R)

    def _pending(
        self,
        plan: StepPlan,
        names: list[str],
        answer: Answered | None,
        prompt: PromptLogprobs | None,
    ) -> Pending:
        pending = super()._pending(plan, names if answer is not None else [], answer, prompt)
        if self._pipeline.is_first:
            pending.on_result = lambda: self._receive_last(plan)
        return pending

    def _receive_last(self, plan: StepPlan) -> None:
        try:
            self._receive(plan.step_id)
        except Exception as error:
            raise self._fault(plan, error) from None


def _tensors(answer: Answered) -> list[torch.Tensor]:
    ids_R, logprobs = answer
    found = [ids_R] if isinstance(ids_R, torch.Tensor) else []
    if logprobs is not None:
        tensors = logprobs.tensors
        found += [tensors.chosen_L, tensors.ranks_L, tensors.top_LK, tensors.top_ids_LK]
    return found
