"""How do I use a model from Python? The offline API: LLM and its results."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ridgeline import demo
from ridgeline.answer import Answer, Choice, ChoiceDelta, check_prompt, resolve_sampling
from ridgeline.build import Built, Progress, build
from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.engine import Engine
from ridgeline.errors import EngineFault, RequestFault
from ridgeline.request import RequestOutput, SamplingParams, TokenLogprobs, joined
from ridgeline.startup import StartUp

if TYPE_CHECKING:
    import torch

    from ridgeline.architectures.spec import ModelSpec
    from ridgeline.observe.evidence import Observatory
    from ridgeline.resolve import MemoryRow
    from ridgeline.text.tokenizer import Tokenizer

MOST_WAITING = 16  # outputs of a request: text is made of so many at once in a third of the time

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class RequestMetrics:
    """When a request's tokens came, in seconds of the engine's clock. Of the guesses that were
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
class _Live:
    """A question that the engine is working on. `waits`: nobody looks at pieces of its answer, and
    no text may end it, so outputs wait in `outputs`, by request, until there are some."""

    answer: Answer
    prompt: str | None
    metrics: RequestMetrics
    waits: bool = False
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    deltas: list[ChoiceDelta] = field(default_factory=list)  # for who looks at them

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
        model: str | None = None,
        *,
        progress: Progress | None = None,
        startup: StartUp | None = None,
        **options: Any,
    ) -> None:
        named = demo.DEFAULT if model is None else str(model)
        config = EngineConfig(model=named, **options)
        self._built: Built = build(config, progress, startup=startup)
        self._live: dict[str, _Live] = {}  # request id -> its question
        self._ids = itertools.count()

    # ------------------------------------------------------------------ what it is

    @property
    def built(self) -> Built:
        """All the parts, for those who measure them."""
        return self._built

    @property
    def engine(self) -> Engine:
        return self._built.engine

    @property
    def watch(self) -> Observatory:
        """What each step cost and should have cost, and where each request's time went."""
        return self._built.watch

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
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Answers in the order of the prompts (texts or token ids), batched by the engine.

        One SamplingParams serves all prompts, a list gives one each, None takes the model's
        defaults. `progress=None` shows a bar for more than eight prompts on a terminal.
        Raises RequestFault before anything runs when a prompt cannot be served, and EngineFault
        when every one of them failed; where only some did, their results carry `.error`.
        """
        many = _as_prompts(prompts)
        chosen = self._one_each(sampling, len(many))
        lives = [self._prepare(p, s) for p, s in zip(many, chosen, strict=True)]
        for live in lives:
            live.waits = not live.answer.sampling.stop
        show = len(many) > 8 and sys.stderr.isatty() if progress is None else progress
        self._submit(lives)
        try:
            self._run_all(lives, show=show)
        except BaseException:
            self._abandon(lives)
            raise
        self._settle()
        results = [live.result() for live in lives]
        if all(result.error for result in results):
            raise EngineFault(results[0].error)
        return results

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None
    ) -> Iterator[ChoiceDelta]:
        """Pieces of the answer as they come. Closing the iterator aborts the request."""
        live = self._prepare(prompt, sampling or self.default_sampling)
        return self._stream(live)

    def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None
    ) -> GenerationResult:
        """The assistant's next message, by the model's own chat template."""
        chosen = sampling or self.sampling(max_tokens=None)
        return self.generate([self.encode_chat(messages)], chosen, progress=False)[0]

    def chat_stream(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None
    ) -> Iterator[ChoiceDelta]:
        """Like `chat`, piece by piece."""
        return self.stream(self.encode_chat(messages), sampling or self.sampling(max_tokens=None))

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] in float32 on the CPU: row t predicts the token after token_ids[t]."""
        ids = check_prompt(token_ids, self.spec.vocab_size)
        if len(ids) > self.resolved.max_model_len:
            raise RequestFault(
                f"{len(ids)} tokens exceed max_model_len {self.resolved.max_model_len}",
                param="token_ids",
                code="context_length_exceeded",
            )
        return self._built.scorer.logits(ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, as `generate` would make them."""
        if self.tokenizer is None:
            raise RequestFault(
                "this model has no tokenizer files; give token ids instead of text", param="prompt"
            )
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the prompt for the assistant's next message, as `chat` would make them."""
        template = self._built.chat_template
        if template is None:
            raise RequestFault(
                "this model has no chat template; use generate with a plain prompt",
                param="messages",
                code="chat_template_missing",
            )
        return template.encode_chat([dict(message) for message in messages])

    def close(self) -> None:
        """Abort what is running."""
        self._abandon(list({id(live): live for live in self._live.values()}.values()))
        self._built.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ details

    def _one_each(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or self.default_sampling] * count
        if len(sampling) != count:
            raise RequestFault(
                f"{count} prompts but {len(sampling)} sampling parameters; give one, or one each",
                param="sampling",
            )
        return list(sampling)

    def _prepare(self, prompt: Prompt, sampling: SamplingParams) -> _Live:
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
        now = self.engine.clock.now()
        answer = Answer(
            f"q{next(self._ids)}",
            ids,
            resolved,
            tokenizer=self.tokenizer,
            end_token_ids=self._built.end_token_ids,
            arrival_time=now,
        )
        return _Live(answer, text, RequestMetrics(now))

    def _submit(self, lives: Sequence[_Live]) -> None:
        try:
            for live in lives:
                for request in live.answer.requests:
                    self.engine.add(request)
                    self._live[request.request_id] = live
        except BaseException:
            self._abandon(lives)
            raise

    def _abandon(self, lives: Sequence[_Live]) -> None:
        for live in lives:
            for request in live.answer.requests:
                self.engine.abort(request.request_id)
                self._live.pop(request.request_id, None)

    def _settle(self) -> None:
        """When nobody waits any more, take in the steps still in flight: blocks come back."""
        while not self._live and not self.engine.is_idle:
            self.engine.step()

    def _step(self) -> int:
        """One engine step, its outputs handed to the questions they belong to; how many of those
        have ended."""
        outputs = self.engine.step()
        if not outputs:
            return 0
        now, num_ended = self.engine.clock.now(), 0
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            if live.metrics.first_token_time is None and output.new_token_ids:
                live.metrics.first_token_time = now
            if not live.take(output):
                continue
            for request_id in live.answer.take_aborts():
                self.engine.abort(request_id)
            if live.answer.is_finished and live.metrics.finish_time is None:
                live.metrics.finish_time = now
                num_ended += 1
                for request in live.answer.requests:
                    self._live.pop(request.request_id, None)
        return num_ended

    def _run_all(self, lives: Sequence[_Live], *, show: bool) -> None:
        if not show:
            while not all(live.answer.is_finished for live in lives):
                while not self._step():  # to look at all of them takes as long as a step
                    pass
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
            while (done := sum(live.answer.is_finished for live in lives)) < len(lives):
                self._step()
                tokens = sum(live.answer.num_output_tokens for live in lives)
                elapsed = max(1e-9, self.engine.clock.now() - start)
                bar.update(task, completed=done, rate=tokens / elapsed)
            bar.update(task, completed=len(lives))

    def _stream(self, live: _Live) -> Iterator[ChoiceDelta]:
        self._submit([live])
        try:
            while True:
                deltas, live.deltas = live.deltas, []
                yield from deltas
                if live.answer.error is not None:
                    raise EngineFault(live.answer.error)
                if live.answer.is_finished and not live.deltas:
                    return
                if not live.answer.is_finished:
                    self._step()
        finally:
            self._abandon([live])
            self._settle()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and all(isinstance(item, int) for item in many):
        return [many]  # type: ignore[list-item]
    if not many:
        raise RequestFault("no prompt was given", param="prompts", code="empty_input")
    return many  # type: ignore[return-value]
