"""What comes back from a step, and when?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ridgeline.errors import EngineFault
from ridgeline.executor.decode_graphs import BEFORE_IDS
from ridgeline.executor.prompt_logprobs import PromptLogprobs
from ridgeline.executor.transfer import Mark
from ridgeline.formats import MAX_DRAFT_TOKENS
from ridgeline.request import UNKNOWN_TOKEN, TokenLogprobs
from ridgeline.sampling.logprobs import LogprobTensors, records
from ridgeline.step import StepResult

# By their number: drafts that stay on the device.
UNKNOWN = tuple((UNKNOWN_TOKEN,) * num for num in range(MAX_DRAFT_TOKENS + 1))
NOT_FINITE = "the model gave no finite logit for its next token (NaN, infinity or all banned)"


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """`rows` index the step's sampling rows; `top_ks` is how many top tokens each shows."""

    rows: tuple[int, ...]
    top_ks: tuple[int, ...]
    tensors: LogprobTensors


@dataclass(slots=True)
class Answers:
    """Of a step of an engine that drafts: what `kernels.drafts.accept` says of each row, and how
    many drafts lie behind its tokens now; numbers where they are on the host already. `limits`:
    how many of its drafts counted. `always`: there are as many as are wanted."""

    answer_RY: torch.Tensor | list[list[int]]
    limits: list[int]
    always: bool

    def take(self, names: list[str], result: StepResult) -> None:
        answers, always = self.answer_RY, self.always
        if isinstance(answers, torch.Tensor):
            if always and not any(self.limits):
                tokens = zip(
                    names, answers[:, 0].tolist(), answers[:, BEFORE_IDS].tolist(), strict=True
                )
                result.token_ids.update({name: (token,) for name, num, token in tokens if num})
                return
            answers = answers.tolist()
        token_ids, drafts, verified = result.token_ids, result.draft_token_ids, result.verified
        for name, limit, answer in zip(names, self.limits, answers, strict=True):
            num = answer[0]
            if not num:
                continue
            token_ids[name] = tuple(answer[BEFORE_IDS : BEFORE_IDS + num])
            if not always:
                drafts[name] = UNKNOWN[answer[-1]]
            found = answer[1]
            looked = limit if limit < found else found
            if looked:
                verified[name] = (looked if looked < num else num, num - 1)
            elif not always:
                verified[name] = (1, answer[2]) if found else (0, 0)


@dataclass(slots=True)
class Pending:
    """A step that was sent off. Tensors are on the host once `mark` is reached (None: at once).

    `token_ids` is -1 for a row whose logits were not finite. `on_fault` turns what the device
    reports into an EngineFault; `on_result` is told that there is one.
    """

    request_ids: list[str]
    token_ids: torch.Tensor | Answers | None
    logprobs: SampledLogprobs | None
    prompt: PromptLogprobs | None
    mark: Mark | None
    on_fault: Callable[[Exception], EngineFault]
    on_result: Callable[[], None] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)  # of rows that may get no token
    _result: StepResult | None = None  # tokens, drafts and faults, once they were read

    def is_over(self) -> bool:
        """A fault counts as its end: `result` will tell of it."""
        return self.mark is None or self.mark.is_reached()

    def result(self) -> StepResult:
        if self.on_result is not None:
            self.on_result()
            self.on_result = None
        try:
            result = self._read()
        except Exception as error:
            raise self.on_fault(error) from None
        if len(result.token_ids) < len(self.request_ids):
            missing = [name for name in self.request_ids if name not in result.token_ids]
            result.faults.update({name: self.reasons.get(name, NOT_FINITE) for name in missing})
        if self.logprobs is not None:
            result.logprobs.update(self._sampled(self.logprobs, result))
        if self.prompt is not None:
            self._add_prompt(self.prompt, result)
        if self.mark is not None:
            self.mark.release()  # all of it is read
        return result

    def token_ids_now(self) -> dict[str, tuple[int, ...]]:
        """The tokens of its rows, for who cannot wait for `result`; waits for the device."""
        return self._read().token_ids

    def _read(self) -> StepResult:
        if (result := self._result) is not None:
            return result
        if self.mark is not None:
            self.mark.synchronize()
        result = self._result = StepResult({})
        if isinstance(self.token_ids, Answers):
            self.token_ids.take(self.request_ids, result)
        elif self.token_ids is not None:
            ids = self.token_ids.tolist()
            tokens = zip(self.request_ids, ids, strict=True)
            result.token_ids.update({name: (i,) for name, i in tokens if i >= 0})
        return result

    def _sampled(
        self, logprobs: SampledLogprobs, result: StepResult
    ) -> dict[str, tuple[TokenLogprobs, ...]]:
        """`logprobs` has as many rows for each of its requests as may have come out."""
        names = [self.request_ids[row] for row in logprobs.rows]
        num_each = len(logprobs.tensors.chosen_L) // max(1, len(names))
        token_ids: list[int] = []
        for name in names:
            got = result.token_ids.get(name, ())
            token_ids += (*got, *[0] * (num_each - len(got)))
        top_ks = [top_k for top_k in logprobs.top_ks for _ in range(num_each)]
        made = records(logprobs.tensors, token_ids, top_ks)
        return {
            name: tuple(made[i * num_each : i * num_each + len(result.token_ids[name])])
            for i, name in enumerate(names)
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
