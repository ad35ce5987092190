"""A model whose answers are known beforehand, with one token for each byte of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ridgeline.answer import Choice
from ridgeline.llm import GenerationResult, RequestMetrics
from ridgeline.request import SamplingParams

END = 256


class FakeLLM:
    """`reply` makes the answer's text of the prompt's; prompts that were asked are kept."""

    def __init__(
        self,
        reply: Callable[[str], str],
        *,
        max_model_len: int = 4096,
        has_chat_template: bool = True,
        ends: Sequence[int] = (END,),
        error: str | None = None,
    ) -> None:
        self.reply = reply
        self.has_chat_template = has_chat_template
        self.resolved = SimpleNamespace(max_model_len=max_model_len)
        self.end_token_ids = frozenset(ends)
        self.tokenizer = SimpleNamespace()
        self.error = error
        self.calls: list[list[tuple[str, SamplingParams]]] = []

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        progress: bool | None = None,
    ) -> list[GenerationResult]:
        texts = [bytes(ids).decode() for ids in prompts]
        self.calls.append(list(zip(texts, sampling, strict=True)))
        return [self._result(text) for text in texts]

    def _result(self, text: str) -> GenerationResult:
        said = self.reply(text)
        choice = Choice(0, said, tuple(said.encode()), "stop")
        ids = tuple(text.encode())
        return GenerationResult(text, ids, (choice,), RequestMetrics(0.0), error=self.error)
