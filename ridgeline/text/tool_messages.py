"""How does a template that knows tools, or one that does not, get a conversation with calls?

Templates differ in what they take of an earlier call: its arguments as an object or as a text, and
what stands for a content that is not there. Which of them one takes is tried once. To a template
without tools they are told in words, in the generic form that `ridgeline.parsers` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

Message = Mapping[str, Any]
SHORT_ID = "length 9"  # what a template of Mistral says of an id that it refuses
NAME, VALUE = "tool_name_7", "argument_value_7"  # of the call that is tried
INTRODUCTION = (
    "You may call tools. To call some, answer with nothing but a JSON list of calls, each of them "
    '{"name": NAME, "arguments": {...}}. The tools, with the JSON schema of their arguments:\n'
)


class CallForm(NamedTuple):
    """How a template takes calls."""

    is_text: bool  # the arguments are JSON text
    no_content: str | None  # what stands where there is none


FORMS = tuple(CallForm(is_text, none) for is_text in (False, True) for none in ("", None))


def find_form(render: Callable[[list[Message], list[Message]], str]) -> CallForm | None:
    """The form in which the template shows a call whole; None when there is none."""
    schema = {"type": "object", "properties": {}}
    tool = {"name": NAME, "description": "A tool.", "parameters": schema}
    function = {"name": NAME, "arguments": {"key": VALUE}}
    call = {"id": "callid123", "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "callid123", "name": NAME, "content": "7"},
    ]
    for form in FORMS:
        try:
            text = render(in_form(messages, form), [{"type": "function", "function": tool}])
        except Exception:  # a template can fail in any way that an expression can
            continue
        answer = text[text.rfind("Hello") :]
        if NAME in answer and VALUE in answer and "None" not in answer and '\\"key' not in answer:
            return form
    return None


def in_form(
    messages: Sequence[Message], form: CallForm, *, short_ids: bool = False
) -> list[Message]:
    """The messages as that template takes them."""
    found: list[Message] = []
    for message in messages:
        made = dict(message)
        if short_ids and isinstance(made.get("tool_call_id"), str):
            made["tool_call_id"] = _short(made["tool_call_id"])
        if calls := message.get("tool_calls"):
            made["tool_calls"] = [_call(call, form, short_ids=short_ids) for call in calls]
            made["content"] = made.get("content") or form.no_content
        found.append(made)
    return found


def _call(call: Message, form: CallForm, *, short_ids: bool) -> Message:
    function = dict(call["function"])
    if form.is_text:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    new_id = _short(call["id"]) if short_ids and isinstance(call.get("id"), str) else call.get("id")
    return {**call, "id": new_id, "function": function}


def _short(call_id: str) -> str:
    """An id of nine letters and digits; the same for the same."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return sha256(call_id.encode()).hexdigest()[:9]


def in_words(messages: Sequence[Message], tools: Sequence[Message] | None) -> list[Message]:
    """The same for a template without tools. They are told at the end of the first system message,
    or before the first message of the user; results of calls are messages of the user."""
    found: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if calls := message.get("tool_calls"):
            shown = [{k: call["function"][k] for k in ("name", "arguments")} for call in calls]
            lines = [content, json.dumps(shown, ensure_ascii=False)]
            found.append({"role": role, "content": "\n".join(filter(None, lines))})
        elif role == "tool":
            text = f"Result of {_name_of(message, messages)}:\n{content}"
            if found and found[-1].get("is_result"):
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text, "is_result": True})
        else:
            found.append(dict(message))
    if tools:
        _introduce(found, tools)
    return [{k: v for k, v in message.items() if k != "is_result"} for message in found]


def _introduce(messages: list[dict[str, Any]], tools: Sequence[Message]) -> None:
    functions = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    text = INTRODUCTION + "\n".join(functions)
    if messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0].get('content') or ''}\n\n{text}".lstrip()
        return
    first = next((m for m in messages if m["role"] == "user"), None)
    if first is None:
        messages.insert(0, {"role": "user", "content": text})
    else:
        first["content"] = f"{text}\n\n{first.get('content') or ''}"


def _name_of(result: Message, messages: Sequence[Message]) -> str:
    """Of the tool that a message answers for."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            if call.get("id") and call["id"] == result.get("tool_call_id"):
                return str(call["function"]["name"])
    return str(result.get("name") or "the call")
