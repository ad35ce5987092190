"""Which beams go on, and when is the search over? Pure: numbers in, choices out.

The rules are those of Hugging Face Transformers' generate(num_beams=W): candidates are ordered by
the sum of log-probabilities; the W best that do not end go on; those of the W best that end are
finished, with their sum divided by length ** length_penalty; W finished ones are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.request import SamplingParams, TokenLogprobs

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
        self._stop = frozenset(sampling.stop_token_ids)

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
        banned = self._stop if length <= self.sampling.min_tokens else frozenset[int]()
        found = [
            _Candidate(hypothesis.score + logprob, parent, rank, token_id, logprob)
            for parent, (hypothesis, top) in enumerate(zip(self.live, tops, strict=True))
            for rank, (token_id, logprob) in enumerate(top)
            if token_id not in banned
        ]
        return sorted(found, key=lambda c: -c.score)

    def _ends(self, candidate: _Candidate, length: int) -> bool:
        return candidate.token_id in self._stop or length == self.sampling.max_tokens

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
