"""What comes back from a step, and when?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ridgeline.errors import EngineFault
from ridgeline.executor.prompt_logprobs import PromptLogprobs
from ridgeline.executor.transfer import Mark
from ridgeline.request import TokenLogprobs
from ridgeline.sampling.logprobs import LogprobTensors, records
from ridgeline.step import StepResult

NOT_FINITE = "the model gave no finite logit for its next token (NaN, infinity or all banned)"


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """`rows` index the step's sampling rows; `top_ks` is how many top tokens each shows."""

    rows: tuple[int, ...]
    top_ks: tuple[int, ...]
    tensors: LogprobTensors


@dataclass(slots=True)
class Pending:
    """A step that was sent off. Tensors are on the host once `mark` is reached (None: at once).

    `token_ids` is -1 for a row whose logits were not finite. `on_fault` turns what the device
    reports into an EngineFault.
    """

    request_ids: list[str]
    token_ids: torch.Tensor | None
    logprobs: SampledLogprobs | None
    prompt: PromptLogprobs | None
    mark: Mark | None
    on_fault: Callable[[Exception], EngineFault]

    def result(self) -> StepResult:
        if self.mark is not None:
            try:
                self.mark.synchronize()
            except Exception as error:
                raise self.on_fault(error) from None
        result = StepResult(self._tokens())
        if len(result.token_ids) < len(self.request_ids):
            missing = [name for name in self.request_ids if name not in result.token_ids]
            result.faults.update(dict.fromkeys(missing, NOT_FINITE))
        if self.logprobs is not None:
            result.logprobs.update(self._sampled(self.logprobs, result))
        if self.prompt is not None:
            self._add_prompt(self.prompt, result)
        return result

    def _tokens(self) -> dict[str, tuple[int, ...]]:
        if self.token_ids is None:
            return {}
        ids = self.token_ids.tolist()
        return {name: (i,) for name, i in zip(self.request_ids, ids, strict=True) if i >= 0}

    def _sampled(
        self, logprobs: SampledLogprobs, result: StepResult
    ) -> dict[str, tuple[TokenLogprobs, ...]]:
        names = [self.request_ids[row] for row in logprobs.rows]
        token_ids = [result.token_ids.get(name, (0,))[0] for name in names]
        made = records(logprobs.tensors, token_ids, logprobs.top_ks)
        return {
            name: (record,)
            for name, record in zip(names, made, strict=True)
            if name in result.token_ids
        }

    def _add_prompt(self, prompt: PromptLogprobs, result: StepResult) -> None:
        for name, chunks in prompt.chunks.items():
            if name not in result.faults:
                result.prompt_logprobs[name] = tuple(r for c in chunks for r in c.records())
        for name, why in prompt.faults.items():
            result.faults[name] = why
            result.token_ids.pop(name, None)
            result.logprobs.pop(name, None)


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that could not be sent off."""

    cause: str

    def result(self) -> StepResult:
        raise EngineFault(self.cause)
