"""How do the engine's outputs for one sample become the text, tokens and ending a user sees?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from ridgeline.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from ridgeline.text.detokenizer import Detokenizer
from ridgeline.text.vocabulary import Vocabulary


class ChoiceDelta(msgspec.Struct, frozen=True):
    """What one step added to choice `index`. `finish_reason` is stop, length, abort or error on the
    last one.

    `stop_reason` is the stop string, or the stop token's id, that ended it; None for one of the
    model's own end tokens.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class SampleAssembler:
    """One sample: push every RequestOutput of its request, in order.

    Joined, the deltas are `text` and `token_ids`, whatever the cut into outputs. A stop token is
    not among them; a stop string is not in the text, but its tokens up to the one that completes
    it are counted. Text that may yet turn out to be part of a stop string, and bytes that are no
    character yet, wait. When a delta finishes and the output did not, the caller must abort the
    request in the engine. As in vLLM, the first `min_tokens` tokens are not searched for stops.
    """

    def __init__(
        self,
        tokenizer: Vocabulary | None,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        *,
        end_token_ids: Collection[int] = frozenset(),
        index: int = 0,
    ) -> None:
        self._index = index
        self._parts: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._sampling = sampling
        self._end_token_ids = frozenset(end_token_ids)
        self._stops = StopFinder(tuple(sampling.stop))
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(
                skip_special_tokens=sampling.skip_special_tokens, prompt_token_ids=prompt_token_ids
            )

    @property
    def text(self) -> str:
        """All text shown so far."""
        self._parts[:] = ["".join(self._parts)]
        return self._parts[0]

    def push(self, output: RequestOutput) -> ChoiceDelta:
        """Take in one output. After the end this gives empty deltas without a finish_reason."""
        if self.finish_reason is not None:
            return ChoiceDelta(self._index)
        token_ids = self._without_stop_token(output)
        texts: list[str] = []
        if self._stops.is_empty:
            self.token_ids += token_ids
            texts.append(self._detokenizer.feed_all(token_ids) if self._detokenizer else "")
        else:
            for count, token_id in enumerate(token_ids, 1):
                self.token_ids.append(token_id)
                shown = self._show(token_id)
                texts.append(shown.text)
                if shown.stop is not None:
                    self.finish_reason, self.stop_reason = FinishReason.STOP.value, shown.stop
                    return self._delta(texts, token_ids[:count], output)
        if output.finish_reason is not None:
            self._finish(output, texts)
        return self._delta(texts, token_ids, output)

    def _without_stop_token(self, output: RequestOutput) -> tuple[int, ...]:
        ids = output.new_token_ids
        stopped = output.finish_reason is FinishReason.STOP
        if stopped and ids and ids[-1] in frozenset(self._sampling.stop_token_ids):
            return ids[:-1]
        return ids

    def _show(self, token_id: int) -> Shown:
        if self._detokenizer is None:
            return Shown("")
        return self._search(self._detokenizer.feed(token_id))

    def _search(self, text: str) -> Shown:
        minimum = self._sampling.min_tokens
        if minimum and len(self.token_ids) <= minimum:
            return Shown(text)
        shown = self._stops.feed(text)
        return Shown(shown.text, shown.stop)

    def _finish(self, output: RequestOutput, texts: list[str]) -> None:
        last = self._search(self._detokenizer.flush() if self._detokenizer else "")
        texts.append(last.text)
        if last.stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP.value, last.stop
            return
        texts.append(self._stops.flush())
        reason = output.finish_reason
        self.finish_reason = reason.value if reason else None
        ids = output.new_token_ids
        if reason is FinishReason.STOP and ids and ids[-1] not in self._end_token_ids:
            self.stop_reason = ids[-1]

    def _delta(
        self, texts: list[str], token_ids: tuple[int, ...], output: RequestOutput
    ) -> ChoiceDelta:
        text = "".join(texts)
        if text:
            self._parts.append(text)
        return ChoiceDelta(
            self._index,
            text,
            token_ids,
            output.logprobs[: len(token_ids)],
            self.finish_reason,
            self.stop_reason,
        )


@dataclass(frozen=True, slots=True)
class Shown:
    """`text` may be shown now; `stop` is the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class _Pattern:
    """How many characters at the end of the text are the beginning of this stop string."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def take(self, char: str) -> bool:
        while self.matched and char != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)


class StopFinder:
    """Finds stop strings in a text that comes in pieces; holds back what may be part of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(text) for text in dict.fromkeys(stops) if text]
        self._held = ""

    @property
    def is_empty(self) -> bool:
        """There is nothing to find."""
        return not self._patterns

    def feed(self, text: str) -> Shown:
        """What can be shown after `text`. Nothing may be fed once a stop string was found."""
        if not self._patterns or not text:
            return Shown(text)
        for i, char in enumerate(text):
            complete = [p for p in self._patterns if p.take(char)]
            if complete:
                stop = max((p.text for p in complete), key=len)
                seen = self._held + text[: i + 1]
                return Shown(seen[: len(seen) - len(stop)], stop)
        seen = self._held + text
        keep = max(p.matched for p in self._patterns)
        self._held = seen[len(seen) - keep :]
        return Shown(seen[: len(seen) - keep])

    def flush(self) -> str:
        """What was held back, now that no more text will come."""
        held, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.matched = 0
        return held
