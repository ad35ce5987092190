"""What does the HTTP process know of the model it serves?"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ridgeline.config import EngineConfig
from ridgeline.parsers import REASONING, parser_class
from ridgeline.parsers.json_calls import JSONCalls
from ridgeline.parsers.parser import Parser, Tags
from ridgeline.server.bodies import ChatBody
from ridgeline.server.chat_messages import CALLS, MAX_CALLS, MessageReader
from ridgeline.server.config import ServeConfig
from ridgeline.server.errors import ApiError, quote
from ridgeline.server.parsed_request import ParsedRequest
from ridgeline.server.text_wire import Loaded, VocabularyTable, vocabulary_of
from ridgeline.server.wire import Ready
from ridgeline.text.vocabulary import Vocabulary


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[ModelCard]


class ServerInfo(msgspec.Struct, frozen=True):
    version: str
    model: tuple[str, ...]
    max_model_len: int
    engine: EngineConfig


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the model writes calls of tools and reasoning in a chat. `vocabulary` shows the special
    tokens that its parser looks for."""

    parser: type[Parser] = Parser
    reasoning: Tags | None = None
    vocabulary: Vocabulary | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The text side of the model, and what the engine process said of the rest.

    `names`: what clients may call it, the first in replies to who calls it nothing. `created` is in
    seconds since 1970, as clients expect it.
    """

    names: tuple[str, ...]
    created: int
    ready: Ready
    vocabulary: Vocabulary | None
    has_chat_template: bool
    texts: TokenTexts
    folder: Path
    table: VocabularyTable | None = None  # what the engine is told of the vocabulary
    format: AnswerFormat = AnswerFormat()

    @property
    def no_grammars(self) -> str:
        """Why no answer can be held to a grammar; "" where any can."""
        if self.table is None or self.table.rule is None:
            return "the bytes of this model's tokens are not known"
        return self.ready.no_grammars or ("" if self.ready.end_token_ids else "it has no end token")

    @property
    def max_model_len(self) -> int:
        return self.ready.max_model_len

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling fields that the model's own generation_config asks for."""
        return dict(self.ready.default_sampling)

    @property
    def name(self) -> str:
        return self.names[0]

    def message_reader(
        self, call: ParsedRequest, prompt_token_ids: Sequence[int]
    ) -> Callable[[], MessageReader]:
        """Makes what reads one choice of the answer to a chat."""
        parser, tags = self.format.parser, self.format.reasoning
        make: Callable[[], Parser] | None = None
        if call.forced_end:
            make = partial(JSONCalls, call.tools)
        elif call.tools or tags is not None or parser.own_reasoning:
            is_reasoning = tags is not None and self._reasons(prompt_token_ids, call, tags)
            make = partial(parser, call.tools, tags, is_reasoning=is_reasoning)
        body = call.body
        most = 1 if isinstance(body, ChatBody) and not body.parallel_tool_calls else MAX_CALLS
        shown = not isinstance(body, ChatBody) or body.include_reasoning
        return lambda: MessageReader(
            None if make is None else make(),
            most_calls=most,
            shows_reasoning=shown,
            short_ids=parser.short_ids,
            end_of_calls=call.forced_end or CALLS,
        )

    def _reasons(self, prompt_token_ids: Sequence[int], call: ParsedRequest, tags: Tags) -> bool:
        """Whether the prompt ends within reasoning."""
        if call.conversation is not None and call.conversation.continue_final_message:
            text = str(call.conversation.messages[-1]["content"])
            return text.rfind(tags.begin) > text.rfind(tags.end)
        if self.vocabulary is None:
            return False
        tail = prompt_token_ids[-2 * len(tags.begin) :]  # a token has a byte at least
        text = self.vocabulary.decode(tail, skip_special_tokens=False)
        return text.rstrip().endswith(tags.begin)

    def check_name(self, name: str) -> None:
        """Raises ApiError when a request names another model."""
        if name and name not in self.names:
            served = " and ".join(map(quote, self.names))
            raise ApiError(
                "model_not_found", f"there is no model {quote(name)} here, but {served}", "model"
            )


def epoch_s() -> int:
    """Wall time in whole seconds since 1970; for stamps in replies only."""
    return int(datetime.now(UTC).timestamp())


def text_folder(config: ServeConfig, ready: Ready | None = None) -> Path | None:
    """Where the tokenizer is; before the engine says where the model is, perhaps None."""
    if ready is not None:
        return Path(config.engine.tokenizer or ready.model_path).expanduser()
    folder = Path(config.engine.tokenizer or config.engine.model).expanduser()
    return folder if folder.is_dir() else None


def served_model(config: ServeConfig, ready: Ready, loaded: Loaded, folder: Path) -> ServedModel:
    """The model as the engine and the tokenizer's process have opened it (blocking)."""
    table = loaded.vocabulary
    vocabulary = None if table is None else vocabulary_of(table)
    if table is not None and vocabulary is None:
        from ridgeline.text.tokenizer import load_tokenizer

        vocabulary = load_tokenizer(folder)  # only it can decode; it was seen to load
    if not ready.end_token_ids and loaded.end_token_id is not None:
        ready = replace(ready, end_token_ids=(loaded.end_token_id,))
    return ServedModel(
        config.served_names or (ready.model_name,),
        epoch_s(),
        ready,
        vocabulary,
        loaded.has_template,
        TokenTexts(vocabulary),
        folder,
        table,
        _answer_format(config, loaded, vocabulary),
    )


def _answer_format(
    config: ServeConfig, loaded: Loaded, vocabulary: Vocabulary | None
) -> AnswerFormat:
    parser = parser_class(config.tool_parser or loaded.tool_parser)
    reasoning = REASONING[config.reasoning_parser or loaded.reasoning_parser]
    if vocabulary is None:
        return AnswerFormat(parser, reasoning)
    looked_for = {*parser.begins, *parser.others, *(reasoning or ())}
    wanted = {text.encode() for text in looked_for}
    shown = {i for i in vocabulary.special_ids if vocabulary.token_bytes(i) in wanted}
    return AnswerFormat(parser, reasoning, vocabulary.showing(shown) if shown else vocabulary)


class TokenTexts:
    """The bytes and the text of each token id; both empty for a model without a tokenizer."""

    def __init__(self, tokenizer: Vocabulary | None) -> None:
        self._tokenizer = tokenizer
        # At most one entry per id of the vocabulary, each.
        self._texts: dict[int, str] = {}
        self._names: dict[int, str] = {}

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def bytes_of(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text_of(self, token_id: int) -> str:
        """Bytes that are no whole characters are shown as U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.bytes_of(token_id).decode("utf-8", "replace")
        return text

    def name_of(self, token_id: int) -> str:
        """Its text, or its bytes where they are no whole characters: tokens that differ there would
        all be U+FFFD, and rows of them are known by their names."""
        name = self._names.get(token_id)
        if name is None:
            raw = self.bytes_of(token_id)
            try:
                name = raw.decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._names[token_id] = name
        return name

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer is not None and self._tokenizer.is_special(token_id)


class Places:
    """Where in a text each of its tokens begins, in characters: one that several tokens make
    together begins with the first of them, and special tokens may be hidden."""

    def __init__(self, texts: TokenTexts, start: int = 0, *, hides_special: bool = False) -> None:
        self._texts = texts
        self._at = start
        self._hides_special = hides_special
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def begin_of(self, token_id: int) -> int:
        """Of the next token."""
        at = self._at
        if not (self._hides_special and self._texts.is_special(token_id)):
            self._at += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return at

    @property
    def end(self) -> int:
        """Of all so far, a character that is not whole included."""
        return self._at + len(self._decoder.decode(b"", final=True))


def places_of_prompt(texts: TokenTexts, token_ids: Sequence[int], shown: str) -> list[int]:
    """Where each token of a prompt begins in the text that is `shown` of it. What its tokens have
    before that (a token that begins every text, a space that was put there) begins with it."""
    places = Places(texts)
    begins = [places.begin_of(token_id) for token_id in token_ids]
    hidden = max(0, places.end - len(shown))
    return [max(0, begin - hidden) for begin in begins]
