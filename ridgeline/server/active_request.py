"""What has come back of one HTTP request so far, and what has its handler not sent yet?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec import structs

from ridgeline.answer import Answer, ChoiceDelta
from ridgeline.observe.latency import SequenceTimes
from ridgeline.observe.requests import PromptChunk
from ridgeline.request import FinishReason, Request, RequestOutput
from ridgeline.server.errors import ApiError, internal_error
from ridgeline.server.wire import Cost

BYTES_PER_LOGPROB = 100  # of JSON, about; for the cap on what a slow reader may make us hold


class ActiveRequest:
    """One request to the server: an Answer per prompt, and one slot of unsent pieces.

    `index` of a piece is its place among all choices: prompt number times n plus the sample.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        *,
        streams: bool,
        max_bytes: int,
        arrival: float,
        wants_cost: bool = False,
        wants_chunks: bool = False,
        request_id: str = "",
    ) -> None:
        self.answers = tuple(answers)
        self.arrival = arrival
        self.wants_cost = wants_cost
        self.wants_chunks = wants_chunks
        self.chunks: list[PromptChunk] = []  # steps that read its prompts, if they are wanted
        self.request_id = request_id
        self.costs: dict[str, Cost] = {}  # of its engine requests, as of their latest output
        self.changed = asyncio.Event()
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: ApiError | None = None
        self.started = False
        self.began: float | None = None  # when its first step was planned
        self.answered = False  # the engine has sent something
        self.num_before = 0  # sequences that waited when it came
        self.expected_wait_s: float | None = None
        self.last_sent = arrival
        self.sending_since: float | None = None
        self.keepalive_due = False
        self.cut: Callable[[], None] | None = None  # drops the connection at once
        self.times = {r.request_id: SequenceTimes(arrival) for r in self.requests}
        self.open_ids = set(self.times)
        self._answer_of = {r.request_id: i for i, a in enumerate(answers) for r in a.requests}
        self._streams = streams
        self._max_bytes = max_bytes
        self._slot: list[ChoiceDelta] = []
        self._slot_bytes = 0

    @property
    def requests(self) -> list[Request]:
        return [request for answer in self.answers for request in answer.requests]

    @property
    def is_finished(self) -> bool:
        return all(answer.is_finished for answer in self.answers)

    def summary(self) -> dict[str, object]:
        """For the access log: sizes, waits and ends, nothing that anybody wrote."""
        times = self.times.values()
        waits = [t.started - t.queued for t in times if t.started is not None and t.queued]
        firsts = [t.first_token - t.arrival for t in times if t.first_token is not None]
        ends = {end for answer in self.answers for end in answer.finish_reasons}
        return {
            "prompt_tokens": sum(len(answer.prompt_token_ids) for answer in self.answers),
            "cached_tokens": sum(answer.num_cached_tokens for answer in self.answers),
            "output_tokens": sum(answer.num_output_tokens for answer in self.answers),
            "queue_seconds": round(min(waits), 6) if waits else None,
            "first_token_seconds": round(min(firsts), 6) if firsts else None,
            "finish_reason": "+".join(sorted(ends)) or None,
        }

    def push(self, output: RequestOutput) -> None:
        """Take in one engine output. Sets `error` when the engine failed on it."""
        number = self._answer_of[output.request_id]
        answer = self.answers[number]
        if output.finish_reason is FinishReason.ERROR:
            self.fail(internal_error())
            return
        pieces = answer.push(output)
        self.answered = True
        if output.finish_reason is not None:
            self.open_ids.discard(output.request_id)
        if self._streams:
            self._keep(number * answer.sampling.n, pieces)
            self.changed.set()
        elif self.is_finished:
            self.changed.set()

    def take_aborts(self) -> list[str]:
        """Engine requests that need not go on, each named once."""
        aborts = [i for answer in self.answers for i in answer.take_aborts()]
        self.open_ids.difference_update(aborts)
        return aborts

    def take(self) -> list[ChoiceDelta]:
        """Empty the slot: what came since the last call, one piece per choice."""
        pieces, self._slot, self._slot_bytes = self._slot, [], 0
        return merge(pieces)

    def fail(self, error: ApiError) -> None:
        """End it with an error; the first one counts."""
        if self.error is None:
            self.error = error
        if not self.admitted.done():
            self.admitted.set_exception(error)
        self.changed.set()

    def keep_alive(self) -> None:
        self.keepalive_due = True
        self.changed.set()

    def _keep(self, first_index: int, pieces: list[ChoiceDelta]) -> None:
        for piece in pieces:
            if first_index:
                piece = structs.replace(piece, index=piece.index + first_index)
            self._slot.append(piece)
            self._slot_bytes += len(piece.text.encode()) + 8 * len(piece.token_ids)
            for entry in piece.logprobs:
                self._slot_bytes += BYTES_PER_LOGPROB * (1 + len(entry.top))
        if self._slot_bytes > self._max_bytes:
            self.fail(ApiError("slow_client", "the client reads its stream too slowly"))
            if self.cut is not None:
                self.cut()


def merge(pieces: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
    """The same pieces, those of one choice joined into one, in order of first appearance."""
    if len(pieces) < 2:
        return list(pieces)
    by_index: dict[int, list[ChoiceDelta]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [_join(group) if len(group) > 1 else group[0] for group in by_index.values()]


def _join(group: Sequence[ChoiceDelta]) -> ChoiceDelta:
    last = group[-1]
    return ChoiceDelta(
        last.index,
        "".join(piece.text for piece in group),
        tuple(i for piece in group for i in piece.token_ids),
        tuple(entry for piece in group for entry in piece.logprobs),
        last.finish_reason,
        last.stop_reason,
    )
