"""How well does a model predict a text? Perplexity per token and per byte, in windows.

A text is cut into windows that the context holds. Each window is scored alone, after the model's
beginning token (or its end token, where it has no other; with neither, the first token of a window
is not scored). Perplexity is exp(sum of -log p / number of units) over all scored tokens, where a
unit is a token or a byte of what they stand for. The interval is exp of the normal approximation
for that ratio of sums, with the windows as independent units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from ridgeline.errors import ConfigError, EngineFault
from ridgeline.evaluation.intervals import Row, ratio
from ridgeline.request import SamplingParams

if TYPE_CHECKING:
    from ridgeline.llm import LLM

SCORE = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
LARGEST = 700.0  # exp() of more is no float


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens in front of the first are not scored; `num_bytes` counts the scored ones' text."""

    token_ids: tuple[int, ...]
    num_bytes: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class Scored:
    """A window and the sum of -log p (nats) of its scored tokens."""

    window: Window
    nll: float


def windows(llm: LLM, texts: Iterable[str]) -> list[Window]:
    """The texts in windows of at most the context less one token (the engine always makes one)."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer, so no text can be scored")
    first = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None][:1]
    size = max(1, llm.resolved.max_model_len - 1 - len(first))
    cuts: list[Window] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        cuts += [
            _window([*first, *ids[start : start + size]], tokenizer.token_bytes)
            for start in range(0, len(ids), size)
        ]
    return [window for window in cuts if window.num_scored > 0]


def _window(token_ids: list[int], bytes_of: Callable[[int], bytes]) -> Window:
    return Window(tuple(token_ids), sum(len(bytes_of(i)) for i in token_ids[1:]))


def score(llm: LLM, found: Sequence[Window], *, progress: bool | None) -> list[Scored]:
    """Every window's loss, batched by the engine. EngineFault when one of them failed."""
    results = llm.generate([w.token_ids for w in found], SCORE, progress=progress)
    scored = []
    for window, result in zip(found, results, strict=True):
        if result.error is not None:
            raise EngineFault(result.error)
        entries = [entry for entry in result.prompt_logprobs or () if entry is not None]
        scored.append(Scored(window, -sum(entry.logprob for entry in entries)))
    return scored


def perplexity_rows(task: str, scored: Sequence[Scored]) -> list[Row]:
    """`perplexity` (n tokens) and `byte_perplexity` (n bytes) of one text or set of texts."""
    tokens = [one.window.num_scored for one in scored]
    sizes = [one.window.num_bytes for one in scored]
    losses = [one.nll for one in scored]
    rows = [_row(task, "perplexity", losses, tokens)]
    if sum(sizes):
        rows.append(_row(task, "byte_perplexity", losses, sizes))
    return rows


def _row(task: str, metric: str, losses: Sequence[float], units: Sequence[int]) -> Row:
    found = ratio(losses, units)
    low, high = (None if end is None else _exp(end) for end in found.interval())
    return Row(task, metric, _exp(found.value), sum(units), low, high)


def _exp(value: float) -> float:
    return exp(min(value, LARGEST))
