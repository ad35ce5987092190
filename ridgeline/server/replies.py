"""What do the answers look like on the wire? OpenAI's objects for completions and chat.

Source of the shapes: https://platform.openai.com/docs/api-reference. `stop_reason`,
`prompt_logprobs`, `token_ids` and `prompt_token_ids` are additions that vLLM's clients know; ids
come when `return_token_ids` asks for them, and always from a model that has no text to show.
`usage.cost` is ours; it comes when `include_cost` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Send

from ridgeline.answer import Answer, Choice, ChoiceDelta
from ridgeline.errors import check
from ridgeline.request import TokenLogprobs
from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.chat_messages import ChatDelta, ChatMessage, MessageReader
from ridgeline.server.errors import ApiError
from ridgeline.server.model import Places, TokenTexts, places_of_prompt
from ridgeline.server.parsed_request import ParsedRequest

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)

LOWEST_LOGPROB = -9999.0  # OpenAI's word for "as good as impossible"; JSON has no -inf
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Drafts that the engine made at the answer and checked."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageCost(msgspec.Struct, frozen=True):
    """Measured seconds of the engine's devices, this request's share of each step it was in; the
    operations and bytes are the cost model's. `money` is in whatever the operator's price is in."""

    device_seconds: float
    flops: int
    bytes: int
    money: float | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    cost: UsageCost | UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatPiece(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


Part = CompletionChoice | ChatChoice | ChatPiece
P = TypeVar("P", bound=Part)
Name = Literal["text_completion", "chat.completion", "chat.completion.chunk"]


class Reply(msgspec.Struct, Generic[P], frozen=True):
    """A whole answer, or one event of a stream (`usage` unset unless it was asked for)."""

    id: str
    object: Name
    created: int
    model: str
    choices: Sequence[P]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


_ENCODE = msgspec.json.Encoder().encode


def usage_of(
    active: ActiveRequest, *, drop_output: bool = False, price_per_hour: float | None = None
) -> Usage:
    """Tokens read and delivered; those of `best_of` that lost were made, so they count."""
    prompt = sum(len(answer.prompt_token_ids) for answer in active.answers)
    output = 0 if drop_output else sum(answer.num_output_tokens for answer in active.answers)
    cached = sum(answer.num_cached_tokens for answer in active.answers)
    cost = cost_of(active, price_per_hour) if active.wants_cost else UNSET
    drafts = _draft_tokens(active)
    return Usage(prompt, output, prompt + output, PromptDetails(cached), drafts, cost)


def _draft_tokens(active: ActiveRequest) -> CompletionDetails | UnsetType:
    """Of all samples; left out where nothing was drafted."""
    accepted = sum(answer.num_accepted_tokens for answer in active.answers)
    rejected = sum(answer.num_rejected_tokens for answer in active.answers)
    return CompletionDetails(accepted, rejected) if accepted + rejected else UNSET


def cost_of(active: ActiveRequest, price_per_hour: float | None) -> UsageCost | None:
    """Of all its samples together; None from an engine that prices nothing."""
    if not active.costs:
        return None
    costs = active.costs.values()
    device_ns = sum(cost.device_ns for cost in costs)
    money = UNSET if price_per_hour is None else price_per_hour * device_ns / 3.6e12
    return UsageCost(
        device_ns / 1e9, sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs), money
    )


class Renderer:
    """Writes the answer to one call."""

    def __init__(
        self,
        call: ParsedRequest,
        reply_id: str,
        created: int,
        model: str,
        texts: TokenTexts,
        prompt_texts: Sequence[str],
        price_per_hour: float | None = None,
        message_reader: Callable[[], MessageReader] | None = None,
    ) -> None:
        self._call = call
        self._new_reader = message_reader
        self._readers: dict[int, MessageReader] = {}  # of each choice of a chat
        self._id = reply_id
        self._created = created
        self._model = call.body.model or model
        self._texts = texts
        self._price_per_hour = price_per_hour
        self._prompt_texts = prompt_texts  # for echo; one per answer
        self._places: dict[int, Places] = {}  # of each choice that is streamed with offsets
        self._begun: set[int] = set()  # choices of which something was streamed
        self._show_ids = call.body.return_token_ids or not texts.has_text
        self.opened = False

    # ------------------------------------------------------------------ the whole answer

    def whole(self, active: ActiveRequest) -> bytes:
        parts: list[Part] = []
        for number, answer in enumerate(active.answers):
            first = number * answer.sampling.n
            parts += [self._part(number, answer, c, first + c.index) for c in answer.choices()]
        name: Name = "chat.completion" if self._call.is_chat else "text_completion"
        usage = self._usage(active)
        asked = active.answers[0].sampling.prompt_logprobs is not None
        chat = self._call.is_chat
        shown = self._prompt_rows(active.answers[0]) if asked and chat else UNSET
        return _ENCODE(
            Reply(
                self._id,
                name,
                self._created,
                self._model,
                parts,
                usage,
                None,
                shown,
                self._ids(active.answers[0].prompt_token_ids) if chat else UNSET,
            )
        )

    def _part(self, number: int, answer: Answer, choice: Choice, index: int) -> Part:
        entries, dropped = choice.logprobs, self._call.drop_output
        if self._call.is_chat:
            logprobs = None if entries is None else self._chat_logprobs(() if dropped else entries)
            reader = self._reader(index)
            return ChatChoice(
                index,
                reader.whole("" if dropped else choice.text),
                logprobs,
                "length" if dropped else reader.finish_reason(choice.finish_reason),
                None if dropped else choice.stop_reason,
                self._ids(() if dropped else choice.token_ids),
            )
        text = "" if dropped else choice.text
        shown: Sequence[TokenLogprobs | int] = () if dropped or entries is None else entries
        places = self._places_of_output()
        before: list[int] = []
        if self._call.echo:
            prompt = self._prompt_texts[number]
            text = prompt + text
            if entries is not None:
                shown = (answer.prompt_token_ids[0], *answer.prompt_logprobs, *shown)
                before = places_of_prompt(self._texts, answer.prompt_token_ids, prompt)
                places = self._places_of_output(len(prompt))
        reason = "length" if dropped else choice.finish_reason
        # With echo and logprobs those of the prompt are the beginning of these.
        asked = answer.sampling.prompt_logprobs is not None and not before
        return CompletionChoice(
            index,
            text,
            None if entries is None else self._completion_logprobs(shown, places, before),
            reason,
            None if dropped else choice.stop_reason,
            self._prompt_rows(answer) if asked else UNSET,
            self._ids(() if dropped else choice.token_ids),
            self._ids(answer.prompt_token_ids),
        )

    def _reader(self, index: int) -> MessageReader:
        found = self._readers.get(index)
        if found is None:
            make = self._new_reader or MessageReader
            found = self._readers[index] = make()
        return found

    def _places_of_output(self, start: int = 0) -> Places:
        hides = self._call.sampling.skip_special_tokens
        return Places(self._texts, start, hides_special=hides)

    def _ids(self, token_ids: tuple[int, ...]) -> tuple[int, ...] | UnsetType:
        return token_ids if self._show_ids else UNSET

    # ------------------------------------------------------------------ pieces of a stream

    def opening(self, num_choices: int) -> bytes:
        """The events before the first token: each message's role, or the prompts to echo."""
        self.opened = True
        if self._call.is_chat:
            role = ChatDelta("assistant", "")
            return b"".join(self._event(ChatPiece(i, role)) for i in range(num_choices))
        if not self._call.echo:
            return b""
        per_prompt = num_choices // len(self._prompt_texts)
        prompts = [text for text in self._prompt_texts for _ in range(per_prompt)]
        return b"".join(
            self._event(CompletionChoice(i, text, None, None)) for i, text in enumerate(prompts)
        )

    def piece(self, delta: ChoiceDelta, active: ActiveRequest) -> bytes:
        """The events for what one choice gained; none when there is nothing to see."""
        if self._call.drop_output:
            delta = ChoiceDelta(delta.index, "", (), (), delta.finish_reason and "length")
        usage = self._running_usage(active)
        prompt_ids = self._prompt_ids(delta, active)
        if not self._call.is_chat:
            return self._completion_piece(delta, usage, prompt_ids)
        events, reader = b"", self._reader(delta.index)
        entries = delta.logprobs if self._call.top_logprobs is not None else ()
        said = reader.delta(delta.text, is_last=delta.finish_reason is not None)
        if said or entries or (self._show_ids and delta.token_ids):
            logprobs = self._chat_logprobs(entries) if entries else None
            piece = ChatPiece(
                delta.index,
                said or ChatDelta(None, ""),
                logprobs,
                token_ids=self._ids(delta.token_ids),
            )
            events = self._event(piece, usage, prompt_ids)
        if delta.finish_reason:
            reason = reader.finish_reason(delta.finish_reason)
            end = ChatPiece(delta.index, ChatDelta(), None, reason, delta.stop_reason)
            events += self._event(end, usage)
        return events

    def usage(self, active: ActiveRequest) -> bytes:
        """The last event of a stream that asked for it."""
        return self._event(None, self._usage(active))

    def _usage(self, active: ActiveRequest) -> Usage:
        return usage_of(
            active, drop_output=self._call.drop_output, price_per_hour=self._price_per_hour
        )

    def _running_usage(self, active: ActiveRequest) -> Usage | None:
        is_asked = self._call.stream_options.continuous_usage_stats
        return self._usage(active) if is_asked else None

    def _prompt_ids(self, delta: ChoiceDelta, active: ActiveRequest) -> tuple[int, ...] | UnsetType:
        """With the first tokens of a choice of a completion, and of the first one of a chat."""
        if not self._show_ids or not delta.token_ids or delta.index in self._begun:
            return UNSET
        self._begun.add(delta.index)
        if self._call.is_chat:
            return UNSET if len(self._begun) > 1 else active.answers[0].prompt_token_ids
        return active.answers[delta.index // self._call.sampling.n].prompt_token_ids

    def _completion_piece(
        self, delta: ChoiceDelta, usage: Usage | None, prompt_ids: tuple[int, ...] | UnsetType
    ) -> bytes:
        entries = delta.logprobs if self._call.top_logprobs is not None else ()
        shown = self._show_ids and delta.token_ids
        if not (delta.text or entries or delta.finish_reason or shown):
            return b""
        logprobs = None
        if entries:
            places = self._places.setdefault(delta.index, self._places_of_output())
            logprobs = self._completion_logprobs(entries, places)
        part = CompletionChoice(
            delta.index,
            delta.text,
            logprobs,
            delta.finish_reason,
            delta.stop_reason,
            token_ids=self._ids(delta.token_ids),
            prompt_token_ids=prompt_ids,
        )
        return self._event(part, usage)

    def _event(
        self,
        part: Part | None,
        usage: Usage | None = None,
        prompt_ids: tuple[int, ...] | UnsetType = UNSET,
    ) -> bytes:
        name: Name = "chat.completion.chunk" if self._call.is_chat else "text_completion"
        reply = Reply(
            self._id,
            name,
            self._created,
            self._model,
            () if part is None else (part,),
            usage if self._call.stream_options.shows_usage else UNSET,
            prompt_token_ids=prompt_ids,
        )
        return b"data: " + _ENCODE(reply) + b"\n\n"

    # ------------------------------------------------------------------ log-probabilities

    def _completion_logprobs(
        self, entries: Sequence[TokenLogprobs | int], places: Places, before: Sequence[int] = ()
    ) -> CompletionLogprobs:
        """`entries` may begin with a bare token id: the first of a prompt, which has none.
        `before`: where the tokens of the prompt begin, if these are the first entries."""
        ids = [e if isinstance(e, int) else e.token_id for e in entries]
        tokens = [self._texts.name_of(token_id) for token_id in ids]
        offsets = [*before, *map(places.begin_of, ids[len(before) :])]
        values = [None if isinstance(e, int) else _finite(e.logprob) for e in entries]
        top: list[dict[str, float] | None] | None = None
        if self._call.top_logprobs:
            top = [None if isinstance(e, int) else self._top(e) for e in entries]
        return CompletionLogprobs(offsets, values, tokens, top)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the chosen one when it is not among them."""
        rows = {self._texts.name_of(i): _finite(value) for i, value in reversed(entry.top)}
        rows = dict(reversed(rows.items()))
        rows.setdefault(self._texts.name_of(entry.token_id), _finite(entry.logprob))
        return rows

    def _chat_logprobs(self, entries: Iterable[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                ChatLogprob(
                    self._texts.text_of(e.token_id),
                    _finite(e.logprob),
                    list(self._texts.bytes_of(e.token_id)),
                    [self._one_of_top(i, value) for i, value in e.top],
                )
                for e in entries
            ]
        )

    def _one_of_top(self, token_id: int, value: float) -> TopLogprob:
        raw = self._texts.bytes_of(token_id)
        return TopLogprob(self._texts.text_of(token_id), _finite(value), list(raw))

    def _prompt_rows(self, answer: Answer) -> PromptLogprobs:
        rows: PromptLogprobs = [None]
        for entry in answer.prompt_logprobs:
            row = {str(i): self._prompt_row(i, v, n) for n, (i, v) in enumerate(entry.top, 1)}
            own = self._prompt_row(entry.token_id, entry.logprob, entry.rank)
            rows.append({str(entry.token_id): own} | row)
        return rows

    def _prompt_row(self, token_id: int, value: float, rank: int) -> PromptLogprob:
        return PromptLogprob(_finite(value), rank, self._texts.text_of(token_id))


def _finite(value: float) -> float:
    return max(LOWEST_LOGPROB, value)


class State(Enum):
    NEW = "new"
    OPEN = "open"
    ENDED = "ended"


class EventStream:
    """NEW -> OPEN -> ENDED. `[DONE]` is written by `finish` alone, an error event by `fail`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.state = State.NEW

    async def write(self, data: bytes) -> None:
        """Send events, the status line first if need be."""
        check(self.state is not State.ENDED, "nothing follows the end of a stream")
        if self.state is State.NEW:
            self.state = State.OPEN
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": list(HEADERS)}
            )
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def keep_alive(self) -> None:
        await self.write(KEEPALIVE)

    async def finish(self, data: bytes) -> None:
        """The last events of a success."""
        await self.write(b"")
        await self._end(data + DONE)

    async def fail(self, error: ApiError) -> None:
        """Before the first byte the error is raised and keeps its status; after it, one event."""
        if self.state is State.NEW:
            raise error
        await self._end(error.event())

    async def _end(self, data: bytes) -> None:
        check(self.state is State.OPEN, "a stream ends once")
        self.state = State.ENDED
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
