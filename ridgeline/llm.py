"""How do I use a model from Python? The offline API: LLM and its results."""

from __future__ import annotations

import itertools
import os
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ridgeline import demo
from ridgeline.answer import Answer, Choice, ChoiceDelta, check_prompt, resolve_sampling
from ridgeline.build import Built, Progress, build
from ridgeline.config import ResolvedConfig, make_config
from ridgeline.engine import Engine
from ridgeline.errors import EngineFault, RequestFault
from ridgeline.prompts import at_prompt, messages_of, one_sampling_each, prompt_of, prompts_of
from ridgeline.request import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    joined,
    plain,
)
from ridgeline.scheduler.policies.base import Overloaded
from ridgeline.startup import StartUp

if TYPE_CHECKING:
    import torch

    from ridgeline.architectures.spec import ModelSpec
    from ridgeline.observe.evidence import RunRecord
    from ridgeline.resolve import MemoryRow
    from ridgeline.text.tokenizer import Tokenizer

MOST_WAITING = 16  # outputs of a request: text is made of so many at once in a third of the time

Prompt = str | Iterable[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class RequestMetrics:
    """When a request's tokens came, in seconds of the engine's clock. Of the drafts that were
    checked for it, `num_accepted_tokens` are in its output and `num_rejected_tokens` are not."""

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def e2e_s(self) -> float | None:
        return None if self.finish_time is None else self.finish_time - self.arrival_time

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.first_token_time is None or self.finish_time is None:
            return None
        return (self.finish_time - self.first_token_time) / max(1, self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The answer to one prompt. `.text`, `.token_ids` ... are those of the first output.

    `prompt_logprobs` (when asked for) has one entry per prompt token, None for the first.
    `error` says what went wrong when a finish_reason is "error": this prompt failed, others of the
    same call did not.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Choice, ...]
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return list(self.outputs[0].token_ids)

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.outputs[0].logprobs


@dataclass(slots=True)
class _ActiveRequest:
    """A question that the engine is working on. `waits`: nobody looks at pieces of its answer, and
    no text may end it, so outputs wait in `outputs`, by request, until there are some."""

    answer: Answer
    prompt: str | None
    metrics: RequestMetrics
    waits: bool = False
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    deltas: list[ChoiceDelta] = field(default_factory=list)  # for who looks at them
    refusal: RequestFault | None = None  # the policy turned it away

    def refuse(self, refusal: RequestFault) -> None:
        """It ends before it began."""
        self.refusal = refusal
        for request in self.answer.requests:
            self.answer.push(
                RequestOutput(request.request_id, (), FinishReason.ERROR, error=str(refusal))
            )

    def take(self, output: RequestOutput) -> bool:
        """Whether the answer has it, and all that came before it."""
        if not self.waits:
            self.deltas += self.answer.push(output)
            return True
        waiting = self.outputs.setdefault(output.request_id, [])
        waiting.append(output)
        if output.finish_reason is None and len(waiting) < MOST_WAITING:
            return False
        self.answer.push(joined(waiting))
        waiting.clear()
        return True

    def result(self) -> GenerationResult:
        asked = self.answer.sampling.prompt_logprobs is not None
        prompt_logprobs = (None, *self.answer.prompt_logprobs) if asked else None
        self.metrics.num_output_tokens = self.answer.num_output_tokens
        self.metrics.num_preemptions = sum(r.num_preemptions for r in self.answer.requests)
        self.metrics.num_cached_tokens = self.answer.num_cached_tokens
        self.metrics.num_accepted_tokens = self.answer.num_accepted_tokens
        self.metrics.num_rejected_tokens = self.answer.num_rejected_tokens
        return GenerationResult(
            self.prompt,
            self.answer.prompt_token_ids,
            tuple(self.answer.choices()),
            self.metrics,
            prompt_logprobs,
            self.answer.error,
        )


class LLM:
    """A model in this process.

    `model` is a folder, a hub id `user/name[@revision]` or a bundled model (`demo:chat`, the
    default, `demo:draft`, `demo:moe`); keyword arguments are the fields of
    `ridgeline.config.EngineConfig`. Raises ConfigError when it cannot be had here.

        from ridgeline import LLM, SamplingParams
        llm = LLM("path/to/model")
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].text)
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
        startup: StartUp | None = None,
        **options: Any,
    ) -> None:
        named = demo.DEFAULT if model is None else model
        given = {name: _option(value) for name, value in options.items()}
        config = make_config({"model": _option(named), **given})
        self._built: Built = build(config, progress, startup=startup)
        self._active: dict[str, _ActiveRequest] = {}  # request id -> its question
        self._ids = itertools.count()
        self._is_closed = False
        self._lock = Lock()  # on the engine, and on what is known of its requests
        self._next = Lock()  # of who waits for it
        self._forgotten: deque[_ActiveRequest] = deque()

    # ------------------------------------------------------------------ what it is

    @property
    def built(self) -> Built:
        """All the parts, for those who measure them."""
        return self._built

    @property
    def engine(self) -> Engine:
        return self._built.engine

    @property
    def run_record(self) -> RunRecord:
        """What each step cost and should have cost, and where each request's time went."""
        return self._built.run_record

    @property
    def spec(self) -> ModelSpec:
        return self._built.spec

    @property
    def resolved(self) -> ResolvedConfig:
        return self._built.resolved

    @property
    def memory(self) -> tuple[MemoryRow, ...]:
        return self._built.memory

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._built.tokenizer

    @property
    def has_chat_template(self) -> bool:
        return self._built.chat_template is not None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens by which the model itself ends an answer."""
        return self._built.end_token_ids

    @property
    def default_sampling(self) -> SamplingParams:
        """What the model's own generation_config asks for."""
        return self._built.generation.sampling()

    def sampling(self, **changes: Any) -> SamplingParams:
        """The model's defaults with some fields changed."""
        return self._built.generation.sampling(**changes)

    # ------------------------------------------------------------------ what it does

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | Iterable[SamplingParams | None] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Answers in the order of the prompts (texts or token ids), batched by the engine.

        Token ids may be a list, a numpy array or a tensor. One SamplingParams serves all prompts, a
        list gives one each, None takes the model's defaults. `progress=None` shows a bar for more
        than eight prompts on a terminal. Raises RequestFault before anything runs when a prompt
        cannot be served, and EngineFault when every one of them failed; where only some did, or a
        policy turned some away, their results carry `.error`.
        """
        many = prompts_of(prompts)
        chosen = one_sampling_each(sampling, len(many), self.default_sampling)
        lives = []
        for index, (prompt, params) in enumerate(zip(many, chosen, strict=True)):
            with _naming(index, len(many)):
                lives.append(self._prepare(prompt, params))
        for active in lives:
            active.waits = not active.answer.sampling.stop
        show = len(many) > 8 and sys.stderr.isatty() if progress is None else progress
        try:
            self._submit(lives)
            self._run_all(lives, show=show)
        finally:
            self._release(lives)
        results = [active.result() for active in lives]
        if all(result.error for result in results):
            raise lives[0].refusal or EngineFault(results[0].error)
        return results

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None
    ) -> Generator[ChoiceDelta, None, None]:
        """Pieces of the answer as they come. The request is aborted and its blocks are free again
        when the iterator is closed or nobody holds it any more, as after an exception in a loop
        over it."""
        (chosen,) = one_sampling_each(sampling, 1, self.default_sampling)
        return self._stream(self._prepare(prompt_of(prompt), chosen))

    def chat(
        self, messages: Iterable[Message], sampling: SamplingParams | None = None
    ) -> GenerationResult:
        """The assistant's next message, by the model's own chat template."""
        (chosen,) = one_sampling_each(sampling, 1, self.sampling(max_tokens=None))
        return self.generate([self.encode_chat(messages)], chosen, progress=False)[0]

    def chat_stream(
        self, messages: Iterable[Message], sampling: SamplingParams | None = None
    ) -> Generator[ChoiceDelta, None, None]:
        """Like `chat`, piece by piece."""
        (chosen,) = one_sampling_each(sampling, 1, self.sampling(max_tokens=None))
        return self.stream(self.encode_chat(messages), chosen)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] in float32 on the CPU: row t predicts the token after token_ids[t]."""
        given = prompt_of(token_ids, "token_ids")
        ids = check_prompt(given if isinstance(given, list) else [given], self.spec.vocab_size)
        if len(ids) > self.resolved.max_model_len:
            raise RequestFault(
                f"{len(ids)} tokens exceed max_model_len {self.resolved.max_model_len}",
                param="token_ids",
                code="context_length_exceeded",
            )
        with self._turn():
            return self._built.scorer.logits(ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, as `generate` would make them."""
        if self.tokenizer is None:
            raise RequestFault(
                "this model has no tokenizer files; give token ids instead of text", param="prompt"
            )
        if not isinstance(text, str):
            raise RequestFault(
                f"text is {type(text).__name__}; give a str", param="text", code="invalid_type"
            )
        with _field("prompt"):
            return self.tokenizer.encode(text)

    def encode_chat(self, messages: Iterable[Message]) -> list[int]:
        """Token ids of the prompt for the assistant's next message, as `chat` would make them."""
        template = self._built.chat_template
        if template is None:
            raise RequestFault(
                "this model has no chat template; use generate with a plain prompt",
                param="messages",
                code="chat_template_missing",
            )
        with _field("messages"):
            return template.encode_chat(messages_of(messages))

    def close(self) -> None:
        """Abort what is running. Nothing is served after it; a second time does nothing."""
        if self._is_closed:
            return
        with self._turn():
            self._is_closed = True
            self._abandon(self._active.values())
            self._clear()
            self._built.close()

    def __enter__(self) -> LLM:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ details

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestFault("this LLM is closed; make another one", param="self", code="closed")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The engine is this thread's for a moment. A thread that comes back for more stands behind
        one that waits."""
        with self._next:
            self._lock.acquire()
        try:
            self._check_open()
            yield
            self._clear()
        finally:
            self._lock.release()
        if self._forgotten:  # meanwhile
            self._release(())

    def _release(self, lives: Sequence[_ActiveRequest]) -> None:
        """Nobody waits for these any more. This may be called in the middle of a step, when a
        forgotten stream is collected: then whoever takes the step does the work."""
        self._forgotten += lives
        while self._forgotten and self._lock.acquire(blocking=False):
            try:
                self._clear()
            finally:
                self._lock.release()

    def _clear(self) -> None:
        """End what nobody waits for. When nothing is left, take in the steps still in flight: their
        blocks come back."""
        while self._forgotten:
            self._abandon([self._forgotten.popleft()])
        while not self._active and not self.engine.is_idle:
            self.engine.step()

    def _prepare(self, prompt: str | list[object], sampling: SamplingParams) -> _ActiveRequest:
        self._check_open()
        text = prompt if isinstance(prompt, str) else None
        ids = check_prompt(
            self.encode(prompt) if isinstance(prompt, str) else prompt, self.spec.vocab_size
        )
        resolved = resolve_sampling(
            sampling,
            len(ids),
            max_model_len=self.resolved.max_model_len,
            vocab_size=self.spec.vocab_size,
            end_token_ids=self._built.end_token_ids,
        )
        if resolved.structured_outputs:
            self._built.check_structured(resolved.constraint)
        now = self.engine.clock.now()
        answer = Answer(
            f"q{next(self._ids)}",
            ids,
            resolved,
            tokenizer=self.tokenizer,
            end_token_ids=self._built.end_token_ids,
            arrival_time=now,
        )
        return _ActiveRequest(answer, text, RequestMetrics(now))

    def _submit(self, lives: Sequence[_ActiveRequest]) -> None:
        with self._turn():
            for index, active in enumerate(lives):
                with _naming(index, len(lives)):
                    self._add(active)

    def _add(self, active: _ActiveRequest) -> None:
        """Into the engine, or its refusal by the policy into it."""
        try:
            for request in active.answer.requests:
                self.engine.add(request)
                self._active[request.request_id] = active
        except Overloaded as refusal:
            self._abandon([active])
            message = (
                f"policy {self.resolved.policy} turned it away: {refusal}, with fewer prompts at "
                "once, or use policy fcfs"
            )
            active.refuse(
                RequestFault(
                    message, param="policy", code=refusal.code, retry_after_s=refusal.retry_after_s
                )
            )

    def _abandon(self, lives: Iterable[_ActiveRequest]) -> None:
        for active in list(lives):
            for request in active.answer.requests:
                self.engine.abort(request.request_id)
                self._active.pop(request.request_id, None)

    def _step(self) -> None:
        """One engine step, its outputs handed to the questions they belong to, whoever asked."""
        outputs = self.engine.step()
        if not outputs:
            return
        now = self.engine.clock.now()
        for output in outputs:
            active = self._active.get(output.request_id)
            if active is None:
                continue
            if active.metrics.first_token_time is None and output.new_token_ids:
                active.metrics.first_token_time = now
            if not active.take(output):
                continue
            for request_id in active.answer.take_aborts():
                self.engine.abort(request_id)
            if active.answer.is_finished and active.metrics.finish_time is None:
                active.metrics.finish_time = now
                for request in active.answer.requests:
                    self._active.pop(request.request_id, None)

    def _run_all(self, lives: Sequence[_ActiveRequest], *, show: bool) -> None:
        if not show:
            left = list(lives)
            while left:  # to look at all of them takes as long as a step
                if left[-1].answer.is_finished:
                    left.pop()
                    continue
                with self._turn():
                    self._step()
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tok/s"),
            TimeRemainingColumn(),
        )
        start = self.engine.clock.now()
        from rich.console import Console

        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=len(lives), rate=0.0)
            while (done := sum(active.answer.is_finished for active in lives)) < len(lives):
                with self._turn():
                    self._step()
                tokens = sum(active.answer.num_output_tokens for active in lives)
                elapsed = max(1e-9, self.engine.clock.now() - start)
                bar.update(task, completed=done, rate=tokens / elapsed)
            bar.update(task, completed=len(lives))

    def _stream(self, active: _ActiveRequest) -> Generator[ChoiceDelta, None, None]:
        try:
            self._submit([active])
            while True:
                with self._turn():
                    if not active.deltas and not active.answer.is_finished:
                        self._step()
                    deltas, active.deltas = active.deltas, []
                yield from deltas
                if active.answer.error is not None:
                    raise active.refusal or EngineFault(active.answer.error)
                if active.answer.is_finished and not active.deltas:
                    return
        finally:
            self._release([active])


@contextmanager
def _naming(index: int, count: int) -> Iterator[None]:
    """The fault of one of several prompts says which."""
    try:
        yield
    except RequestFault as fault:
        if count == 1:
            raise
        raise at_prompt(fault, index) from None


@contextmanager
def _field(name: str) -> Iterator[None]:
    """A fault that names no field is of this one."""
    try:
        yield
    except RequestFault as fault:
        fault.param = fault.param or name
        raise


def _option(value: object) -> object:
    """torch.float16, torch.device and paths, in the words of EngineConfig."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else plain(value)
