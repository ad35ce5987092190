"""What is a request, and how far has it got?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from operator import attrgetter
from typing import NoReturn, TypeVar, dataclass_transform

from ridgeline.errors import RequestFault

T = TypeVar("T")

PLAIN_TYPES = frozenset({int, float, bool, str, type(None), tuple, frozenset, list, dict})
UNKNOWN_TOKEN = -1  # sampled on the device, not yet read back to the host

MAX_N = 8
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 256
MAX_LOGPROBS = 20
MAX_REPETITION = 1e6  # and its inverse: beyond these logits are no float32 any more
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A slotted dataclass that nobody writes to, which the type checker holds: a frozen one takes
    four times as long to make, and of these there is one for each row of each step."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def plain(value: object) -> object:
    """`value` in Python's own types, if it is an array, a tensor or a number of numpy, PyTorch or
    pandas: all of them have `tolist`."""
    if type(value) in PLAIN_TYPES or isinstance(value, type):
        return value
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def _fail(field_name: str, message: str, code: str = "invalid_value") -> NoReturn:
    raise RequestFault(f"{field_name} {message}", param=field_name, code=code)


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _fail(name, f"must be a number, not {type(value).__name__}", "invalid_type")
    elif not math.isfinite(value) or not low <= value <= high:
        _fail(name, f"must be between {low:g} and {high:g}")


def _integer(name: str, value: object, low: int, high: int, code: str = "invalid_value") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _fail(name, f"must be an integer, not {type(value).__name__}", "invalid_type")
    elif not low <= value <= high:
        _fail(name, f"must be between {low} and {high}", code)


def _items(name: str, values: object, most: int, what: str) -> tuple[object, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        _fail(name, f"must be a list of {what}", "invalid_type")
    items = tuple(map(plain, islice(values, most + 1)))
    if len(items) > most:
        _fail(name, f"takes at most {most} {what}", "limit_exceeded")
    return items


def _strings(name: str, values: object) -> tuple[str, ...]:
    texts: list[str] = []
    items = (
        (values,) if isinstance(values, str) else _items(name, values, MAX_STOP_STRINGS, "strings")
    )
    for text in items:
        if not isinstance(text, str):
            _fail(name, "must be a string or a list of strings", "invalid_type")
        if not text:
            _fail(name, "must not contain an empty string")
        if len(text) > MAX_STOP_LENGTH:
            _fail(name, f"strings are at most {MAX_STOP_LENGTH} long", "limit_exceeded")
        texts.append(text)
    return tuple(texts)


def _token_ids(name: str, values: object) -> frozenset[int]:
    ids: list[int] = []
    for token_id in _items(name, values, MAX_STOP_TOKEN_IDS, "token ids"):
        _integer(name, token_id, 0, 1 << 31, "invalid_token_id")
        if isinstance(token_id, int):
            ids.append(token_id)
    return frozenset(ids)


def _bias(name: str, values: object) -> tuple[tuple[int, float], ...]:
    pairs = values.items() if isinstance(values, Mapping) else values
    found: dict[int, float] = {}
    for pair in _items(name, pairs, MAX_LOGIT_BIAS, "tokens"):
        if not isinstance(pair, tuple) or len(pair) != 2:
            _fail(name, "must map token ids to numbers", "invalid_type")
        token_id, value = map(plain, pair)
        _integer(name, token_id, 0, 1 << 31, "invalid_token_id")
        _number(name, value, -100.0, 100.0)
        found[token_id] = value  # type: ignore[index, assignment]
    return tuple(sorted(found.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of an answer. Bad values raise RequestFault with the field's name.

    temperature 0 is greedy. top_k 0 or -1 is off. `max_tokens=None` means up to the context's end.
    `stop` strings are cut from the text, `stop_token_ids` (and the model's own end tokens, unless
    `ignore_eos`) end it. `n` answers are returned, the best of `best_of`. `beam_width` above 1 is
    beam search: `n` (at most the width) best beams by sum of log-probabilities divided by
    length ** length_penalty. `seed` makes the noise a function of (seed, position) alone.
    `logprobs=k` gives the chosen token's log-probability (of the raw logits' log-softmax) and the
    k likeliest.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = frozenset()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        put = object.__setattr__  # normalise the values of a frozen record, once
        if not PLAIN_TYPES.issuperset(map(type, _values(self))):
            for name in self.__slots__:
                put(self, name, plain(getattr(self, name)))
        put(self, "stop", _strings("stop", self.stop))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put(self, "logit_bias", _bias("logit_bias", self.logit_bias))
        self._check_numbers()
        for name in ("ignore_eos", "early_stopping", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _fail(name, "must be true or false", "invalid_type")

    def _check_numbers(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 30)
        _integer("min_tokens", self.min_tokens, 0, 1 << 30)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, 1 << 30)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            _fail("top_p", "must be above 0 (use temperature 0 for greedy)")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        _integer("n", self.n, 1, MAX_N, "limit_exceeded")
        if self.best_of is not None:
            _integer("best_of", self.best_of, 1, MAX_N, "limit_exceeded")
            if self.best_of < self.n:
                _fail("best_of", f"must be at least n ({self.n})")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, 0, MAX_LOGPROBS, "limit_exceeded")
        _integer("beam_width", self.beam_width, 1, MAX_N, "limit_exceeded")
        if self.beam_width > 1 and self.n > self.beam_width:
            _fail("n", f"must not exceed beam_width ({self.beam_width})")
        if self.beam_width > 1 and self.best_of is not None:
            _fail("best_of", "cannot be combined with beam_width")

    @property
    def num_samples(self) -> int:
        """How many answers the engine makes: `best_of` when given, else `n`."""
        return self.best_of or self.n

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def resolved(self, max_tokens: int, seed: int, end_token_ids: Iterable[int]) -> SamplingParams:
        """The same with what was open: numbers that are right, and, unless ignored, the model's own
        end tokens among `stop_token_ids`. Nothing is checked once more: prompts wait for this."""
        made, put = object.__new__(SamplingParams), object.__setattr__
        for name in self.__slots__:
            put(made, name, getattr(self, name))
        put(made, "max_tokens", max_tokens)
        put(made, "seed", seed)
        if not self.ignore_eos:
            put(made, "stop_token_ids", frozenset(self.stop_token_ids).union(end_token_ids))
        return made


_values = attrgetter(*SamplingParams.__slots__)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token and of the likeliest ones at its position, likeliest first.

    Taken from the log-softmax of the raw logits (before penalties, temperature and filters), as
    the field's servers do. `rank` counts from 1.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine. An answer with n > 1 is n requests that share their prompt.

    `sampling.stop_token_ids` already holds the model's end tokens, `max_tokens` and `seed` are
    set. `fork_of` names the request whose prompt blocks this one shares as soon as they are
    computed; if that request is gone, this one is served like any other. `tenant` says on whose
    behalf it is: shares of the engine are counted by tenant, and `weight` is how many times the
    share of an ordinary one it gets.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: bytes = b""
    fork_of: str | None = None
    tenant: bytes = b""
    weight: float = 1.0
    # How far it has got. Only the scheduler writes below this line.
    order: int = 0  # of arrival, from 1
    stop_token_ids: frozenset[int] = frozenset()  # those of `sampling`
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    draft_token_ids: tuple[int, ...] = ()  # guesses at what follows token_ids
    num_computed_tokens: int = 0  # planned; an upper bound while drafts are in flight
    num_done_tokens: int = 0  # of them, what collected steps are known to have written
    num_computable_tokens: int = 0  # nobody reads the last token of an answer
    num_roomy_tokens: int = 0  # below this it may compute token by token, in blocks all its own
    block_ids: list[list[int]] = field(default_factory=list)  # one table per KV group
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0  # leading blocks that the prefix cache has been told of
    num_dropped_blocks: list[int] = field(default_factory=list)  # that left the window, per group
    num_cached_tokens: int = 0  # of the prompt, not computed by itself at first admission
    num_prompt_logprobs: int = 0  # delivered so far
    num_preemptions: int = 0
    epoch: int = 0  # raised when its blocks go: a result of an older epoch has no place any more
    has_row: bool = False  # the executor keeps a row for it
    has_drafts: bool = False  # that row has guesses
    has_output: bool = False  # something was delivered
    is_ended: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """The one number the scheduler works on. Prefill, chunk, decode and
        recovery from preemption differ only in how large it is."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_known_tokens(self) -> int:
        tokens = self.token_ids
        n = len(tokens)
        while n and tokens[n - 1] == UNKNOWN_TOKEN:
            n -= 1
        return n

    @property
    def max_num_tokens(self) -> int:
        if self.sampling.max_tokens is None:
            raise RequestFault("max_tokens is not resolved", param="max_tokens")
        return len(self.prompt_token_ids) + self.sampling.max_tokens


@record
class RequestOutput:
    """What one step (or an abort, or a fault) gave one request. Nothing follows a finish_reason.

    A stop token is part of `new_token_ids`. `prompt_logprobs` come with the chunk that computed
    them; the first prompt token has none. `error` is set with FinishReason.ERROR.
    `num_cached_tokens` is set on the first output alone. `beams` is set on the only output of a
    beam search: finished sequences, best first, each (token ids, score, log-probabilities of its
    tokens); `new_token_ids` are then those of the best. Of the guesses that the step checked,
    `num_accepted` are among the new tokens and `num_rejected` are not.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    error: str | None = None
    beams: tuple[tuple[tuple[int, ...], float, tuple[TokenLogprobs, ...]], ...] = ()
    num_accepted: int = 0
    num_rejected: int = 0


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One in the place of several of one request, in their order; at least one."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    return RequestOutput(
        last.request_id,
        tuple([token_id for output in outputs for token_id in output.new_token_ids]),
        last.finish_reason,
        tuple([entry for output in outputs for entry in output.logprobs]),
        tuple([entry for output in outputs for entry in output.prompt_logprobs]),
        max([output.num_cached_tokens for output in outputs]),
        last.error,
        last.beams,
        sum([output.num_accepted for output in outputs]),
        sum([output.num_rejected for output in outputs]),
    )
