"""How does the text of a chat's answer become a message, whole or bit by bit? Content, reasoning
and calls of tools, as OpenAI's clients take them; `reasoning_content` is what DeepSeek, vLLM and
SGLang call the reasoning."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType, structs

from ridgeline.parsers.parser import Kind, Parser, Piece

ID_BYTES = 12
CALLS = "tool_calls"
MAX_CALLS = 1 << 16  # of tools in one answer


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments` are the text that the model wrote: usually a JSON object."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    type: str
    function: FunctionCall


class FunctionDelta(msgspec.Struct, frozen=True):
    """`name` comes first; the texts of `arguments`, joined, are those of the call."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    """`content` is null beside calls or reasoning when there is none."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class MessageReader:
    """Reads one choice. Without a parser its text is the content, as it stands."""

    def __init__(
        self,
        parser: Parser | None = None,
        *,
        most_calls: int = MAX_CALLS,
        shows_reasoning: bool = True,
        short_ids: bool = False,
        end_of_calls: str = CALLS,
    ) -> None:
        """`short_ids`: see Parser. `end_of_calls`: the finish reason after calls."""
        self._parser = parser
        self._short_ids, self._end_of_calls = short_ids, end_of_calls
        self._most_calls = most_calls
        self._shows_reasoning = shows_reasoning
        self._num_calls = 0

    def whole(self, text: str) -> ChatMessage:
        if self._parser is None:
            return ChatMessage("assistant", text)
        texts, calls = {Kind.CONTENT: "", Kind.REASONING: ""}, list[ToolCall]()
        for kind, run in self._read(text, is_last=True):
            if kind is Kind.CALL:
                calls.append(ToolCall(self._new_id(), "function", FunctionCall(run, "")))
            elif kind is Kind.ARGUMENTS:
                call = calls[-1]
                calls[-1] = ToolCall(call.id, call.type, FunctionCall(call.function.name, run))
            else:
                texts[kind] += run
        content, reasoning = texts[Kind.CONTENT], texts[Kind.REASONING]
        return ChatMessage(
            "assistant",
            None if (calls or reasoning) and not content else content,
            None,
            reasoning or UNSET,
            calls or UNSET,
        )

    def delta(self, text: str, *, is_last: bool) -> ChatDelta | None:
        """What `text` adds; None when nothing can be told yet. `is_last`: no more will come."""
        if self._parser is None:
            return ChatDelta(None, text) if text else None
        texts: dict[Kind, str] = {}
        calls: list[ToolCallDelta] = []
        for kind, run in self._read(text, is_last=is_last):
            index = self._num_calls - 1
            if kind is Kind.CALL:
                name = FunctionDelta("", run)
                calls.append(ToolCallDelta(index, name, self._new_id(), "function"))
            elif kind is Kind.ARGUMENTS and calls:  # one entry for a call: so clients expect it
                function = structs.replace(calls[-1].function, arguments=run)
                calls[-1] = structs.replace(calls[-1], function=function)
            elif kind is Kind.ARGUMENTS:
                calls.append(ToolCallDelta(index, FunctionDelta(run)))
            else:
                texts[kind] = texts.get(kind, "") + run
        if not texts and not calls:
            return None
        return ChatDelta(None, texts.get(Kind.CONTENT), texts.get(Kind.REASONING), calls or None)

    def finish_reason(self, reason: str) -> str:
        """What OpenAI calls the end of an answer with calls."""
        return self._end_of_calls if reason == "stop" and self._num_calls else reason

    def _read(self, text: str, *, is_last: bool) -> Iterator[Piece]:
        """What is shown of the next text. `_num_calls` includes a call that was just yielded."""
        parser = self._parser
        if parser is None:
            return
        for piece in _joined([*parser.feed(text), *(parser.finish() if is_last else ())]):
            if piece.kind is Kind.CALL:
                self._num_calls += self._num_calls <= self._most_calls
            is_call = piece.kind in (Kind.CALL, Kind.ARGUMENTS)
            is_hidden = is_call and self._num_calls > self._most_calls
            if not is_hidden and (piece.kind is not Kind.REASONING or self._shows_reasoning):
                yield piece

    def _new_id(self) -> str:
        """Mistral's templates want nine letters and digits."""
        new = secrets.token_hex(ID_BYTES)
        return new[:9] if self._short_ids else f"call_{new}"


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind together, but for calls."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].kind is piece.kind is not Kind.CALL:
            found[-1] = Piece(piece.kind, found[-1].text + piece.text)
        else:
            found.append(piece)
    return found
