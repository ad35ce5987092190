"""How does one question become engine requests, and their outputs an answer?

Used by the offline API and by the server alike, so that `n`, `best_of`, beams and stop strings
mean the same in both.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import countOf
from typing import Any

import msgspec
from msgspec import structs

from ridgeline.errors import RequestFault
from ridgeline.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    plain,
)
from ridgeline.text.assemble import ChoiceDelta as ChoiceDelta
from ridgeline.text.assemble import SampleAssembler
from ridgeline.text.vocabulary import Vocabulary


class Choice(msgspec.Struct, frozen=True):
    """One finished answer. `cumulative_logprob` is known when log-probabilities were computed."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class _Sample:
    request: Request
    assembler: SampleAssembler
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def resolve_sampling(
    sampling: SamplingParams,
    num_prompt_tokens: int,
    *,
    max_model_len: int,
    vocab_size: int,
    end_token_ids: Iterable[int],
) -> SamplingParams:
    """`sampling` with every open field set: max_tokens, seed and the model's end tokens.

    Raises RequestFault when prompt and answer exceed `max_model_len` tokens or a token id is not
    below `vocab_size`.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestFault(
            f"the prompt has {num_prompt_tokens} tokens and this model serves at most "
            f"{max_model_len} in all, one of them of the answer; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens > room:
        raise RequestFault(
            f"prompt ({num_prompt_tokens} tokens) and max_tokens ({max_tokens}) exceed the "
            f"{max_model_len} tokens this model serves; ask for at most {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if sampling.min_tokens > max_tokens:
        raise RequestFault(f"min_tokens must not exceed {max_tokens}", param="min_tokens")
    for name, ids in (
        ("logit_bias", dict(sampling.logit_bias)),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        for token_id in ids:
            if token_id >= vocab_size:
                raise RequestFault(
                    f"{name}: token id {token_id} is not below the vocabulary size {vocab_size}",
                    param=name,
                    code="invalid_token_id",
                )
    seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
    return sampling.resolved(max_tokens, seed, end_token_ids)


def check_prompt(token_ids: Sequence[object], vocab_size: int) -> tuple[int, ...]:
    """The prompt's ids as a tuple. RequestFault when it is empty or an id is out of range."""
    if not token_ids:
        raise RequestFault("the prompt is empty", param="prompt", code="empty_input")
    ids: tuple[Any, ...] = tuple(token_ids)
    are_plain = countOf(map(type, ids), int) == len(ids)
    if not are_plain:
        ids = tuple(map(plain, ids))
    if not are_plain or min(ids) < 0 or max(ids) >= vocab_size:  # no loop here: prompts are long
        _check_each(ids, vocab_size)
    return ids


def _check_each(ids: tuple[object, ...], vocab_size: int) -> None:
    """Names the first that is wrong; one of a type derived from int may be right."""
    for position, token_id in enumerate(ids):
        name = f"prompt[{position}]"
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestFault(f"{name} is not an integer", param=name, code="invalid_token_id")
        if not 0 <= token_id < vocab_size:
            raise RequestFault(
                f"{name}: token id {token_id} is not in 0..{vocab_size - 1}",
                param=name,
                code="invalid_token_id",
            )


def sample_seed(seed: int, index: int) -> int:
    """Seed of the index-th of n samples: the request's own for the first, then hashes of both."""
    if index == 0:
        return seed
    digest = sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _mean_logprob(choice: Choice) -> float:
    return (choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids))


class Answer:
    """One question with `n` choices: its engine requests, and what has come back of them.

    `sampling` is resolved (see `resolve_sampling`). Feed every RequestOutput of `requests` to
    `push`; abort in the engine what `take_aborts` names; read `choices` when `is_finished`.
    """

    def __init__(
        self,
        answer_id: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        tokenizer: Vocabulary | None,
        end_token_ids: frozenset[int],
        arrival_time: float,
        priority: int = 0,
        cache_salt: bytes = b"",
        tenant: bytes = b"",
        weight: float = 1.0,
    ) -> None:
        if sampling.stop and tokenizer is None:
            raise RequestFault(
                "stop strings need a tokenizer and this model has none", param="stop"
            )
        self.answer_id = answer_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_cached_tokens = 0
        self.num_accepted_tokens = 0  # of all samples: drafts that were checked and right
        self.num_rejected_tokens = 0
        self.error: str | None = None
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._beams: list[Choice] | None = None
        self._aborts: list[str] = []
        self._samples: dict[str, _Sample] = {}
        self._index: dict[str, int] = {}
        first: str | None = None
        for index in range(1 if sampling.beam_width > 1 else sampling.num_samples):
            request_id = f"{answer_id}-{index}"
            request = Request(
                request_id,
                prompt_token_ids,
                self._sampling_of(index),
                arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                fork_of=first,
                tenant=tenant,
                weight=weight,
            )
            first = first or request_id
            self._samples[request_id] = _Sample(request, self._assembler(index))
            self._index[request_id] = index

    def _sampling_of(self, index: int) -> SamplingParams:
        sampling = self.sampling
        if sampling.beam_width > 1 or sampling.num_samples == 1:
            return sampling
        changes: dict[str, object] = {"n": 1, "best_of": None}
        if sampling.num_samples > sampling.n and sampling.logprobs is None:
            changes["logprobs"] = 0  # to rank the samples by
        if index:
            changes["prompt_logprobs"] = None
        if sampling.seed is not None:
            changes["seed"] = sample_seed(sampling.seed, index)
        return structs.replace(sampling, **changes)

    def _assembler(self, index: int) -> SampleAssembler:
        return SampleAssembler(
            self._tokenizer,
            self.sampling,
            self.prompt_token_ids,
            end_token_ids=self._end_token_ids,
            index=index,
        )

    @property
    def requests(self) -> list[Request]:
        return [sample.request for sample in self._samples.values()]

    @property
    def is_finished(self) -> bool:
        return self._beams is not None or all(s.finish_reason for s in self._samples.values())

    @property
    def num_output_tokens(self) -> int:
        """Tokens delivered, over all samples made (those of `best_of` that lost included)."""
        if self._beams is not None:
            return sum(len(choice.token_ids) for choice in self._beams)
        return sum(len(sample.assembler.token_ids) for sample in self._samples.values())

    @property
    def finish_reasons(self) -> set[str]:
        """Of the samples that have ended."""
        ended = self._beams if self._beams is not None else self._samples.values()
        return {one.finish_reason for one in ended if one.finish_reason}

    def push(self, output: RequestOutput) -> list[ChoiceDelta]:
        """Take in one engine output. Outputs after a choice's end are ignored."""
        sample = self._samples[output.request_id]
        if sample.finish_reason:
            return []
        self.prompt_logprobs += output.prompt_logprobs
        if self._index[output.request_id] == 0:  # the others share its prompt once it is read
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.num_rejected_tokens += output.num_rejected
        if output.finish_reason is FinishReason.ERROR:
            self.error = output.error or "the engine failed"
        if output.beams:
            return self._take_beams(output)
        had = len(sample.assembler.token_ids)
        delta = sample.assembler.push(output)
        # What lies behind a stop string was drafted right and is nobody's.
        delivered = len(sample.assembler.token_ids) - had
        self.num_accepted_tokens += min(output.num_accepted, delivered)
        sample.logprobs += delta.logprobs
        sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.finish_reason and output.finish_reason is None:
            self._aborts.append(output.request_id)  # a stop string: the engine does not know yet
        return [self._shown(delta)]

    def _shown(self, delta: ChoiceDelta) -> ChoiceDelta:
        """Without the log-probabilities that nobody asked for but `best_of`."""
        if self.sampling.logprobs is not None or not delta.logprobs:
            return delta
        return structs.replace(delta, logprobs=())

    def take_aborts(self) -> list[str]:
        """Request ids that the engine need not go on with; each is named once."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def choices(self) -> list[Choice]:
        """The `n` choices; with `best_of`, those of the highest mean log-probability."""
        if self._beams is not None:
            return self._beams
        made = [self._choice(s, self._index[i]) for i, s in self._samples.items()]
        if len(made) > self.sampling.n:
            made.sort(key=_mean_logprob, reverse=True)
        return [
            structs.replace(choice, index=i) for i, choice in enumerate(made[: self.sampling.n])
        ]

    def _choice(self, sample: _Sample, index: int) -> Choice:
        total = sum(entry.logprob for entry in sample.logprobs) if sample.logprobs else None
        return Choice(
            index,
            sample.assembler.text,
            tuple(sample.assembler.token_ids),
            sample.finish_reason or "abort",
            sample.stop_reason,
            tuple(sample.logprobs) if self.sampling.logprobs is not None else None,
            total,
        )

    def _take_beams(self, output: RequestOutput) -> list[ChoiceDelta]:
        choices, deltas = [], []
        for index, (token_ids, score, logprobs) in enumerate(output.beams):
            ended = bool(token_ids) and token_ids[-1] in frozenset(self.sampling.stop_token_ids)
            reason = FinishReason.STOP if ended else FinishReason.LENGTH
            assembler = self._assembler(index)
            delta = self._shown(
                assembler.push(
                    RequestOutput(output.request_id, token_ids, reason, logprobs=logprobs)
                )
            )
            choices.append(
                Choice(
                    index,
                    assembler.text,
                    tuple(assembler.token_ids),
                    delta.finish_reason or reason.value,
                    delta.stop_reason,
                    delta.logprobs if self.sampling.logprobs is not None else None,
                    score,
                )
            )
            deltas.append(delta)
        self._beams = choices
        return deltas
