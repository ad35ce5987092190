"""Which rows of the executor serve one beam search?"""

from __future__ import annotations

from msgspec import structs

from ridgeline.errors import InternalError
from ridgeline.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from ridgeline.scheduler.beam import BeamSearch, num_candidates
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.prefix_cache import Prefix

ROW_MARK = "/beam-"  # no request's own id has it


def row_sampling(sampling: SamplingParams) -> SamplingParams:
    """What the executor is asked for each beam: its likeliest next tokens, from raw logits."""
    asked = num_candidates(sampling)
    return structs.replace(sampling, logprobs=asked, temperature=0.0, min_tokens=0)


class BeamGroup:
    """One row (a Request of its own) per live beam, in the order of the search.

    The first row is the request itself. A beam that goes on keeps its row; where a beam goes on
    more than once, the others fork it and share its blocks; rows of beams that end are closed.
    A row that has reported its likeliest tokens waits until all of them have.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.search = BeamSearch(request.sampling)
        self.sampling = row_sampling(request.sampling)
        self.rows = [request]
        self._reports: dict[str, TokenLogprobs] = {}
        self._num_forks = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def is_whole(self) -> bool:
        """Do all rows have their blocks? (After a preemption the first row gets them first.)"""
        return all(row.block_ids for row in self.rows)

    def limit(self, row: Request) -> int:
        """How many of its tokens may be computed now: the first row waits at the end of the prompt
        for the others to take it over."""
        return (
            len(row.token_ids) if self.is_whole or len(self.rows) == 1 else self.num_prompt_tokens
        )

    def num_held_blocks(self) -> int:
        return len({b for row in self.rows for table in row.block_ids for b in table if b})

    def shared_prompt(self, blocks: BlockManager) -> Prefix:
        """The prompt as the first row has it."""
        return _shared(self.rows[0], self.num_prompt_tokens, blocks)

    def report(self, row: Request, logprobs: TokenLogprobs) -> bool:
        """Take one row's likeliest tokens. True when all rows have reported."""
        self._reports[row.request_id] = logprobs
        return len(self._reports) == len(self.rows)

    def forget_reports(self) -> None:
        self._reports.clear()

    def advance(self, blocks: BlockManager) -> list[Request]:
        """Choose the beams that go on. Returns the rows that have no part in that."""
        tops = [self._reports[row.request_id].top for row in self.rows]
        self._reports.clear()
        before, parents = self.rows, self.search.advance(tops)
        rows: list[Request] = []
        for parent in parents:
            row = before[parent]
            rows.append(self._fork(row, blocks) if row in rows else row)
        for row, hypothesis in zip(rows, self.search.live, strict=True):
            row.token_ids.append(hypothesis.token_ids[-1])
        self.rows = rows
        return [row for row in before if row not in rows]

    def output(self) -> RequestOutput:
        """The one output of a search that is over."""
        best = self.search.best()
        first, stop = best[0], frozenset(self.request.sampling.stop_token_ids)
        return RequestOutput(
            self.request.request_id,
            tuple(first.token_ids),
            FinishReason.STOP if first.token_ids[-1] in stop else FinishReason.LENGTH,
            logprobs=tuple(first.logprobs) if self.request.sampling.logprobs is not None else (),
            num_cached_tokens=self.request.num_cached_tokens,
            beams=tuple((tuple(h.token_ids), h.score, tuple(h.logprobs)) for h in best),
        )

    def _fork(self, row: Request, blocks: BlockManager) -> Request:
        self._num_forks += 1
        child = Request(
            f"{self.request.request_id}{ROW_MARK}{self._num_forks}",
            row.prompt_token_ids,
            row.sampling,
            row.arrival_time,
            row.priority,
            row.cache_salt,
            tenant=row.tenant,
            weight=row.weight,
            order=self.request.order,
            num_computable_tokens=row.num_computable_tokens,
        )
        child.token_ids = list(row.token_ids)
        child.block_hashes = list(row.block_hashes)
        blocks.admit(child, _shared(row, row.num_computed_tokens, blocks))
        return child


def _shared(row: Request, num_tokens: int, blocks: BlockManager) -> Prefix:
    prefix = blocks.share(row, num_tokens)
    if prefix is None:
        raise InternalError(f"a beam holds what its fork needs ({row.request_id})")
    return prefix
