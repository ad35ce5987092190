"""What did a step give to whom?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.request import FinishReason, Request, RequestOutput, TokenLogprobs
from ridgeline.scheduler.policies.base import InFlight
from ridgeline.scheduler.state import SchedulerState
from ridgeline.step import ScheduledRequest, StepResult


class ResultTaker:
    """Brings results home: tokens to their requests, blocks to the prefix cache, ends."""

    def __init__(self, state: SchedulerState, *, may_draft: bool) -> None:
        self.state = state
        self.num_late = 0  # of rows that had been closed
        self.tells_all = True  # False: rows that go on have no output
        self._may_draft = may_draft

    def take_all(self, in_flight: Sequence[InFlight], result: StepResult) -> list[RequestOutput]:
        """What one step gave, in the order of its rows."""
        special = result.faults or result.logprobs or result.prompt_logprobs
        if special or (result.draft_token_ids and not self._may_draft):
            take = self.take
            return [output for flown in in_flight if (output := take(flown, result)) is not None]
        return self._take_tokens_alone(in_flight, result)

    def _take_tokens_alone(
        self, in_flight: Sequence[InFlight], result: StepResult
    ) -> list[RequestOutput]:
        """The same where there is nothing but tokens. Most rows of most steps have had some before
        and go on: these are done here, without a call for each, and all others by `take`."""
        outputs: list[RequestOutput] = []
        sampled, drafts, blocks = result.token_ids, result.draft_token_ids, self.state.blocks
        size, edges, last_planned = blocks.block_size, blocks.edges, self.state.last_planned
        has_windows, tells_all, may_draft = blocks.has_windows, self.tells_all, self._may_draft
        for flight in in_flight:
            entry, row, epoch = flight
            if row.epoch == epoch and row.has_output and entry.samples:
                new = sampled[row.request_id]
                first = row.num_done_tokens + 1  # with drafts in flight, before that of the plan
                if entry.num_tokens == 1:
                    (token_id,) = new
                    if first < row.num_computable_tokens and token_id not in row.stop_token_ids:
                        row.token_ids[first] = token_id
                        row.num_done_tokens = first
                        if may_draft:
                            row.draft_token_ids = drafts.get(row.request_id, ())
                        if first % size in edges:
                            blocks.publish(row, last_planned)
                        if tells_all:
                            outputs.append(RequestOutput(row.request_id, new))
                        continue
                elif entry.num_tokens == entry.num_draft + 1:
                    num_draft, done = entry.num_draft, row.num_done_tokens + len(new)
                    if done < row.num_computable_tokens and row.stop_token_ids.isdisjoint(new):
                        right = len(new) - 1
                        row.token_ids[first : first + num_draft + 1] = new
                        row.num_computed_tokens -= num_draft - right
                        row.num_done_tokens = done
                        row.draft_token_ids = drafts.get(row.request_id, ()) if drafts else ()
                        if has_windows or done // size > row.num_published_blocks:
                            blocks.publish(row, last_planned)
                        wrong = num_draft - right
                        outputs.append(
                            RequestOutput(
                                row.request_id, new, None, (), (), 0, None, (), right, wrong
                            )
                        )
                        continue
            if (output := self.take(flight, result)) is not None:
                outputs.append(output)
        return outputs

    def take(self, flight: InFlight, result: StepResult) -> RequestOutput | None:
        entry, row, _ = flight
        if row.is_ended:
            self.num_late += 1
            return None
        if result.faults and entry.request_id in result.faults:
            return self._fault(row, result.faults[entry.request_id])
        return self._take_tokens(flight, result)

    def _take_tokens(self, flight: InFlight, result: StepResult) -> RequestOutput | None:
        """A request that was preempted meanwhile still gets its token, which it waits for; but
        nothing of an older epoch counts as computed."""
        entry, request, epoch = flight
        request_id = request.request_id
        new: tuple[int, ...] = ()
        reason: FinishReason | None = None
        num_rejected = 0
        if entry.samples:
            sampled = result.token_ids[request_id]
            num_rejected = entry.num_draft + 1 - len(sampled)
            new, reason = _append(request, entry, sampled)
        if request.epoch == epoch:
            request.num_computed_tokens -= num_rejected
            request.num_done_tokens += entry.num_tokens - num_rejected
            if reason is not None:  # accepted drafts may have been cut
                request.num_done_tokens = min(request.num_done_tokens, request.num_known_tokens)
            request.draft_token_ids = result.draft_token_ids.get(request_id, ())
            self.state.blocks.publish(request, self.state.last_planned)
        logprobs = result.logprobs[request_id][: len(new)] if request_id in result.logprobs else ()
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if request.sampling.prompt_logprobs is not None:
            prompt_logprobs = _prompt_logprobs(request, entry, result)
        if reason is not None:
            self.state.end(request, has_blocks=request.sampling.beam_width > 1)
        if not new and not prompt_logprobs:
            return None
        num_cached = 0 if request.has_output else request.num_cached_tokens
        request.has_output = True
        accepted = min(entry.num_draft - num_rejected, len(new)) if entry.num_draft else 0
        return RequestOutput(
            request_id,
            new,
            reason,
            logprobs,
            prompt_logprobs,
            num_cached,
            num_accepted=accepted,
            num_rejected=entry.num_draft - accepted,
        )

    def _fault(self, row: Request, reason: str) -> RequestOutput:
        """Its numbers went wrong: it ends, and nobody may find what it wrote."""
        self.state.blocks.forget(row)
        return self.state.end_with_error(row, reason)


def verified_of_running(
    verified: Mapping[str, tuple[int, int]], outputs: Sequence[RequestOutput]
) -> dict[str, tuple[int, int]]:
    """`StepResult.checked` of those that `outputs` are for, up to where they end: what a model says
    behind its last token, in the same step or in one that was under way, is not what it is drafted
    to say."""
    living = {}
    for output in outputs:
        name = output.request_id
        if name in verified:
            num_verified, num_right = verified[name]
            num_taken = len(output.new_token_ids)
            living[name] = min(num_verified, num_taken), min(num_right, num_taken)
    return living


def _append(
    request: Request, entry: ScheduledRequest, sampled: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Put known tokens where unknown ones stand; those of rejected drafts go."""
    first = request.num_known_tokens
    room = request.num_computable_tokens + 1 - first
    new, reason = _cut(sampled, room, request.stop_token_ids)
    request.token_ids[first : first + entry.num_draft + 1] = new
    return new, reason


def _cut(
    token_ids: tuple[int, ...], room: int, stop: frozenset[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The tokens up to a stop token or the request's end."""
    if not stop.isdisjoint(token_ids):
        for i, token_id in enumerate(token_ids[:room]):
            if token_id in stop:
                return token_ids[: i + 1], FinishReason.STOP
    return token_ids[:room], FinishReason.LENGTH if len(token_ids) >= room else None


def _prompt_logprobs(
    request: Request, entry: ScheduledRequest, result: StepResult
) -> tuple[TokenLogprobs, ...]:
    """Those that were not delivered before a preemption."""
    got = result.prompt_logprobs.get(request.request_id, ())
    new = got[max(0, request.num_prompt_logprobs - entry.start) :]
    request.num_prompt_logprobs += len(new)
    return new
