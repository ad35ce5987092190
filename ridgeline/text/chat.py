"""How does a conversation become the prompt that this model was trained on?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError, RequestFault
from ridgeline.loader.folder import read_bytes, read_object, refuse
from ridgeline.loader.gguf import is_gguf, read_gguf
from ridgeline.parsers import GENERIC, find_parser
from ridgeline.text.template import MAX_OUTPUT_CHARS, Template, TemplateRefusal
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tool_messages import SHORT_ID, CallForm, find_form, in_form, in_words

MARK = "\ufdd0"  # a noncharacter: Unicode reserves it for use inside programs
END_MARK = "\ufdd1"  # another: where the text of the last message ends
MAX_REASON_CHARS = 200
NO_TOKENIZER = "this model has no tokenizer files; give token ids"

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Written:
    """What a template made of messages; `is_marked`: MARK stands inside the control tokens that the
    messages spell out."""

    text: str
    is_marked: bool = False


class ChatTemplate:
    """The model's own chat template, and the tokenizer its texts are for.

    `templates` maps names to sources; "default" is the usual one, "tool_use" (when there is one)
    serves requests that offer tools. ConfigError when one is not a template.
    """

    def __init__(
        self, templates: Mapping[str, str], tokenizer: Tokenizer | None, path: Path
    ) -> None:
        self._tokenizer = tokenizer
        self._in_words = False  # tools are told so
        self._templates = {name: _compile(source, path) for name, source in templates.items()}
        self._named = dict(tokenizer.named_tokens) if tokenizer is not None else {}
        self._everywhere, self._in_foreign_words = self._control_tokens()

    @property
    def sources(self) -> list[str]:
        return [template.source for template in self._templates.values()]

    def choose_parser(self, name: str | None = None) -> str:
        """The name of the parser for calls of tools: `name` itself, or what the template says. With
        the generic one the tools are told in words from now on."""
        name = name or (GENERIC if self.call_form is None else find_parser(self.sources))
        self._in_words = name == GENERIC
        return name

    @cached_property
    def call_form(self) -> CallForm | None:
        """How the template takes calls of tools; None when it knows none."""
        if not any("tool" in source for source in self.sources):
            return None
        return find_form(self.render)

    def with_tools(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[Sequence[Message], Sequence[Message] | None]:
        """The conversation as this template takes it, if it offers tools or has calls of them."""
        if not tools and not any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            return messages, None
        if self._in_words or (form := self.call_form) is None:
            return in_words(messages, tools), None
        short_ids = any(SHORT_ID in source for source in self.sources)
        return in_form(messages, form, short_ids=short_ids), tools

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The prompt as text. RequestFault (code invalid_messages) when it is refused."""
        _check_messages(messages)
        values = {
            "documents": None,
            **self._named,
            **kwargs,
            "messages": _plain(messages),
            "tools": _plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._choose(tools).render(values)
        except TemplateRefusal as refusal:
            raise _fault(str(refusal)) from None
        except RequestFault:
            raise
        except Exception as error:  # a template can fail in any way that an expression can
            raise _fault(f"the chat template failed ({type(error).__name__})") from error

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        """The prompt as token ids; special tokens count only where the template writes them.

        A special token that a message spells out is encoded as ordinary text.
        """
        return self.encode(self.write(messages, tools, add_generation_prompt, **kwargs))

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> Written:
        """The first half of that: all that the template does."""
        if self._tokenizer is None:
            raise RequestFault(NO_TOKENIZER, param="messages")
        _check_messages(messages)
        given: list[object] = [list(messages), tools, kwargs]
        if not any(map(self._in_foreign_words.search, _texts(given))):
            return Written(self.render(messages, tools, add_generation_prompt, **kwargs))
        text = self.render(
            [self._marked_message(message) for message in messages],
            None if tools is None else self._marked(list(tools), self._in_foreign_words),
            add_generation_prompt,
            **self._marked(dict(kwargs), self._in_foreign_words),
        )
        return Written(text, is_marked=True)

    def write_unended(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> Written:
        """The same up to where the last message's text ends, so that an answer goes on with it."""
        last = {**messages[-1], "content": f"{messages[-1].get('content') or ''}{END_MARK}"}
        written = self.write([*messages[:-1], last], tools, False, **kwargs)
        begin, mark, _ = written.text.rpartition(END_MARK)
        if not mark:
            raise _fault("it leaves out the message that is to be continued")
        return replace(written, text=begin)

    def encode(self, written: Written) -> list[int]:
        """The second half: all that the tokenizer does."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestFault(NO_TOKENIZER, param="messages")
        if not written.is_marked:
            return tokenizer.encode(written.text, add_special_tokens=False)
        ids = tokenizer.encode_marked(written.text, MARK)
        if _num_special(tokenizer, ids) > len(self._everywhere.findall(written.text)):
            raise _fault("a message spells out a special token that this vocabulary cannot avoid")
        return ids

    def _marked_message(self, message: Message) -> Message:
        foreign = message.get("role") != "assistant"
        pattern = self._in_foreign_words if foreign else self._everywhere
        marked: Message = self._marked(dict(message), pattern)
        return marked

    def _marked(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """`value` with the mark inside every control token of its texts and keys."""
        if isinstance(value, str):
            return pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._marked(k, pattern): self._marked(v, pattern) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, pattern) for item in value]
        return value

    def _control_tokens(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """What must not be parsed in a message: special tokens; in words that are not the
        assistant's also the other added tokens that the template writes to give a text its
        structure (some models have their role tokens there), unless it acts on them itself."""
        if self._tokenizer is None:
            return _any_of([]), _any_of([])
        added = self._tokenizer.added_tokens.items()
        special = [text for i, text in added if self._tokenizer.is_special(i)]
        written = [t for template in self._templates.values() for t in template.written_texts()]
        searched = [t for template in self._templates.values() for t in template.searched_texts()]
        structure = [
            text
            for _, text in added
            if any(text in t for t in written) and not any(text in t for t in searched)
        ]
        return _any_of(special), _any_of({*special, *structure})

    def _choose(self, tools: object) -> Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))


def _num_special(tokenizer: Tokenizer, ids: Iterable[int]) -> int:
    """Special tokens among `ids`, apart from <unk> and those too short to be marked."""
    unknown = tokenizer.named_tokens.get("unk_token")
    special = (tokenizer.added_tokens[i] for i in ids if tokenizer.is_special(i))
    return sum(len(token) > 1 and token != unknown for token in special)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of `tokens` at each place, in time that does not grow with their number."""
    # A token of one character has no inside to put the mark in.
    inside = sorted({token for token in tokens if len(token) > 1})
    return re.compile(_alternatives(inside) if inside else r"(?!)")


def _alternatives(tokens: Sequence[str]) -> str:
    """A regular expression for sorted texts in which no two branches begin alike."""
    groups: dict[str, list[str]] = {}
    for token in tokens:
        if token:
            groups.setdefault(token[0], []).append(token)
    branches: list[str] = []
    for group in groups.values():
        start = _shared_start(group[0], group[-1])
        rest = [token[len(start) :] for token in group]
        branches.append(re.escape(start) + (_alternatives(rest) if len(rest) > 1 else ""))
    joined = "|".join(branches)
    return f"(?:{joined})?" if "" in tokens else f"(?:{joined})"


def _shared_start(first: str, last: str) -> str:
    """What all of a sorted list begin with: what its first and its last begin with."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(char for char, _ in pairs)


def _compile(source: str, path: Path) -> Template:
    if len(source) > MAX_OUTPUT_CHARS:
        refuse(path, f"the chat template is longer than {MAX_OUTPUT_CHARS} characters")
    try:
        return Template(source)
    except Exception as error:  # Jinja's own, and what Python raises for a source without end
        refuse(path, f"the chat template is not valid Jinja ({str(error)[:MAX_REASON_CHARS]})")


def _fault(reason: str) -> RequestFault:
    shown = "".join(char if char.isprintable() else " " for char in reason)[:MAX_REASON_CHARS]
    return RequestFault(
        f"messages: the model's chat template refused them: {shown}",
        param="messages",
        code="invalid_messages",
    )


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestFault("messages is empty", param="messages", code="empty_input")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestFault(
                f"messages[{i}] needs a role", param=f"messages[{i}]", code="invalid_messages"
            )


def _plain(value: Any) -> Any:
    """`value` made of nothing but JSON's own types, so that a template finds no methods in it."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise RequestFault(
        f"messages hold a {type(value).__name__}, which is no JSON value",
        param="messages",
        code="invalid_messages",
    )


def _texts(value: object) -> Iterable[str]:
    """All strings in a value made of JSON's types, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def load_chat_template(
    folder: Path, tokenizer: Tokenizer | None, own: Path | None = None
) -> ChatTemplate | None:
    """The chat template in the file `own`, else that of a model folder or a GGUF file; None when
    it has none. ConfigError for a broken one.

    chat_template.jinja comes before chat_template.json and that before tokenizer_config.json.
    """
    if own is not None:
        return ChatTemplate(_read_jinja(own), tokenizer, own)
    if is_gguf(folder):
        templates = _read_metadata(folder)
        return ChatTemplate(templates, tokenizer, folder) if templates else None
    for name, read in (
        ("chat_template.jinja", _read_jinja),
        ("chat_template.json", _read_json),
        ("tokenizer_config.json", _read_json),
    ):
        path = folder / name
        if path.exists() and (templates := read(path)):
            return ChatTemplate(templates, tokenizer, path)
    return None


def _read_metadata(path: Path) -> dict[str, str]:
    """`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for others."""
    key = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    for name, source in read_gguf(path).metadata.items():
        if name == key or name.startswith(f"{key}."):
            if not isinstance(source, str):
                refuse(path, f"{name[:80]} is no text")
            templates[name[len(key) + 1 :] or "default"] = source
    return templates


def _read_jinja(path: Path) -> dict[str, str]:
    try:
        return {"default": read_bytes(path, MAX_OUTPUT_CHARS).decode()}
    except UnicodeDecodeError:
        refuse(path, "is not UTF-8 text")


def _read_json(path: Path) -> dict[str, str]:
    """`chat_template`: a text, or a list of {name, template}."""
    found = read_object(path).get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    templates: dict[str, str] = {}
    for item in found if isinstance(found, list) else [found]:
        name = item.get("name") if isinstance(item, Mapping) else None
        source = item.get("template") if isinstance(item, Mapping) else None
        if not isinstance(name, str) or not isinstance(source, str):
            raise ConfigError(f"{path}: chat_template is neither a text nor a list of named texts")
        templates[name] = source
    return templates
