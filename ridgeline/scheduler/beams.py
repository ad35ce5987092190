"""Which beams go on, and when is the search over? And which requests compute them?

The rules are those of Hugging Face Transformers' generate(num_beams=W): candidates are ordered by
the sum of log-probabilities; the W best that do not end go on; those of the W best that end are
finished, with their sum divided by length ** length_penalty; W finished ones are kept.

The scheduler plans beams like any other requests. Each beam is a request that ends with the one
token that it samples; when all beams of a search have ended, the search chooses, and each beam that
goes on is a new request: the tokens of an old one and the chosen token. It takes over the blocks of
the old one where that ended with the same result; else, after a preemption, it waits in line, and
what the prefix cache does not have is computed anew. So a beam holds nothing while it waits for the
others, and no search can block itself or another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from ridgeline.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from ridgeline.scheduler.state import SchedulerState

BEAM_MARK = "/beam-"  # in the ids of beams; no request's own id has it

Top = Sequence[tuple[int, float]]  # (token id, log-probability), likeliest first


@dataclass(slots=True)
class Hypothesis:
    """An answer so far. `score` is its sum of log-probabilities, normalised by length once it is
    finished."""

    token_ids: list[int] = field(default_factory=list)
    score: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def extended(self, token: TokenLogprobs, score: float) -> Hypothesis:
        return Hypothesis([*self.token_ids, token.token_id], score, [*self.logprobs, token])


@dataclass(frozen=True, slots=True)
class _Candidate:
    score: float
    parent: int
    rank: int  # among its parent's, from 0
    token_id: int
    logprob: float


def num_candidates(sampling: SamplingParams) -> int:
    """How many likeliest tokens each beam must report: even if all stop tokens are among them,
    enough are left to go on."""
    return sampling.beam_width + max(sampling.beam_width, len(frozenset(sampling.stop_token_ids)))


class BeamSearch:
    """Starts with one empty hypothesis; `live` is in the order of score, best first."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self.width = sampling.beam_width
        self.live = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.stop = frozenset(sampling.stop_token_ids)

    def advance(self, tops: Sequence[Top]) -> list[int]:
        """Take one report per live hypothesis; `live` grows by a token.

        Returns for each new live hypothesis the index of the one it continues; empty: it is over.
        """
        length = len(self.live[0].token_ids) + 1
        candidates = self._candidates(tops, length)
        going = [c for c in candidates if not self._ends(c, length)][: self.width]
        ending = [c for c in candidates[: self.width] if self._ends(c, length)]
        penalty = float(length) ** self.sampling.length_penalty
        grown = [self._grow(c, c.score / penalty, tops) for c in ending]
        self.finished = sorted(self.finished + grown, key=lambda h: -h.score)[: self.width]
        if not going or not self._can_improve(going[0].score / penalty):
            self.live = []
            return []
        self.live = [self._grow(c, c.score, tops) for c in going]
        return [c.parent for c in going]

    def best(self) -> list[Hypothesis]:
        """The `n` best finished ones, best first."""
        return self.finished[: self.sampling.n]

    def _candidates(self, tops: Sequence[Top], length: int) -> list[_Candidate]:
        banned = self.stop if length <= self.sampling.min_tokens else frozenset[int]()
        found = [
            _Candidate(hypothesis.score + logprob, parent, rank, token_id, logprob)
            for parent, (hypothesis, top) in enumerate(zip(self.live, tops, strict=True))
            for rank, (token_id, logprob) in enumerate(top)
            if token_id not in banned
        ]
        return sorted(found, key=lambda c: -c.score)

    def _ends(self, candidate: _Candidate, length: int) -> bool:
        return candidate.token_id in self.stop or length == self.sampling.max_tokens

    def _grow(self, candidate: _Candidate, score: float, tops: Sequence[Top]) -> Hypothesis:
        top = tuple(tops[candidate.parent][: self.sampling.logprobs or 0])
        token = TokenLogprobs(candidate.token_id, candidate.logprob, candidate.rank + 1, top)
        return self.live[candidate.parent].extended(token, score)

    def _can_improve(self, best_possible: float) -> bool:
        """May a live one still displace a finished one? The best live score at today's length is
        taken as its best possible, as Transformers does."""
        if len(self.finished) < self.width:
            return True
        return not self.sampling.early_stopping and best_possible > self.finished[-1].score


# ---------------------------------------------------------------------- beams as requests


def beam_sampling(sampling: SamplingParams) -> SamplingParams:
    """What the executor is asked for each beam: its likeliest next tokens, from raw logits."""
    return structs.replace(
        sampling,
        max_tokens=1,
        min_tokens=0,
        temperature=0.0,
        logprobs=num_candidates(sampling),
        stop_token_ids=frozenset(),
    )


class Search:
    """The search of one request, which is not planned itself: its beams are. `beams` are in the
    order of `search.live`; `first` has the id of the request, and the prompt alone."""

    def __init__(self, asked: Request) -> None:
        self.asked = asked
        self.search = BeamSearch(asked.sampling)
        self.sampling = beam_sampling(asked.sampling)
        self.first = self._beam(asked.request_id, asked.prompt_token_ids)
        self.beams = [self.first]
        self._reports: dict[str, TokenLogprobs] = {}
        self._num_made = 0

    def report(self, output: RequestOutput) -> bool:
        """Take one beam's likeliest tokens. True when all beams have reported."""
        self._reports[output.request_id] = output.logprobs[-1]
        self.asked.num_cached_tokens = self.first.num_cached_tokens
        return len(self._reports) == len(self.beams)

    def advance(self) -> Iterator[tuple[Request, Request]]:
        """Choose; each beam that goes on, with the one that it continues."""
        before = self.beams
        self.count_preemptions()
        parents = self.search.advance([self._reports[beam.request_id].top for beam in before])
        self._reports.clear()
        self.beams = []
        for parent, hypothesis in zip(parents, self.search.live, strict=True):
            self._num_made += 1
            name = f"{self.asked.request_id}{BEAM_MARK}{self._num_made}"
            tokens = (*before[parent].prompt_token_ids, hypothesis.token_ids[-1])
            self.beams.append(self._beam(name, tokens))
        if self.beams:  # policies know the search by its first beam
            self.first.token_ids = self.beams[0].token_ids
        return zip(self.beams, [before[parent] for parent in parents], strict=True)

    def count_preemptions(self) -> None:
        self.asked.num_preemptions += sum([beam.num_preemptions for beam in self.beams])

    def _beam(self, name: str, token_ids: tuple[int, ...]) -> Request:
        asked = self.asked
        return Request(
            name,
            token_ids,
            self.sampling,
            asked.arrival_time,
            asked.priority,
            asked.cache_salt,
            fork_of=None if name == asked.request_id else asked.request_id,
            tenant=asked.tenant,
            weight=asked.weight,
        )

    def output(self) -> RequestOutput:
        """The one output of a search that is over."""
        asked, best = self.asked, self.search.best()
        tokens = tuple(best[0].token_ids)
        return RequestOutput(
            asked.request_id,
            tokens,
            FinishReason.STOP if tokens[-1] in self.search.stop else FinishReason.LENGTH,
            logprobs=tuple(best[0].logprobs) if asked.sampling.logprobs is not None else (),
            num_cached_tokens=asked.num_cached_tokens,
            beams=tuple([(tuple(h.token_ids), h.score, tuple(h.logprobs)) for h in best]),
        )


class BeamSearches:
    """All searches of one scheduler, by the id of the request that asked."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._searches: dict[str, Search] = {}

    def __len__(self) -> int:
        return len(self._searches)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._searches

    def asked(self, beam_id: str) -> Request | None:
        """The request whose search this beam is part of."""
        search = self._searches.get(beam_id.partition(BEAM_MARK)[0])
        return None if search is None else search.asked

    def open(self, search: Search) -> None:
        self._searches[search.asked.request_id] = search

    def lead(self, outputs: Sequence[RequestOutput], now: float) -> list[RequestOutput]:
        """To be called with what a step gave: searches that are complete go on. Returns the outputs
        for those who asked."""
        told: list[RequestOutput] = []
        for output in outputs:
            search = self._searches.get(output.request_id.partition(BEAM_MARK)[0])
            if search is None:
                if BEAM_MARK not in output.request_id:  # else its search has failed just now
                    told.append(output)
            elif output.finish_reason is FinishReason.ERROR:
                self._end(search)
                name, reason = search.asked.request_id, output.error
                told.append(RequestOutput(name, (), FinishReason.ERROR, error=reason))
            elif search.report(output):
                for beam, parent in search.advance():
                    self._state.go_on(beam, parent, now)
                if not search.beams:
                    self._end(search)
                    told.append(search.output())
        self._state.free_ended()
        return told

    def finish(self, request_id: str) -> bool:
        """End a search, in whatever state it is. False for an unknown id."""
        if (search := self._searches.get(request_id)) is None:
            return False
        self._end(search)
        return True

    def _end(self, search: Search) -> None:
        for beam in search.beams:
            if not beam.is_ended:
                self._state.end(beam)
        search.count_preemptions()
        search.asked.is_ended = True
        self._state.running.policy.on_end(search.first)
        del self._searches[search.asked.request_id]
