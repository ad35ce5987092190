"""What tokens is this text, and what text are these tokens? The two routes beside the API."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import msgspec

from ridgeline.answer import check_prompt
from ridgeline.errors import ConfigError, RequestFault
from ridgeline.loader.folder import parse_object, read_bytes
from ridgeline.server.bodies import DetokenizeBody, TokenizeChat, TokenizeText, read
from ridgeline.server.chat import conversation_of
from ridgeline.server.errors import ApiError, from_fault
from ridgeline.server.model import ServedModel
from ridgeline.server.prepare import conversation_question, need_tokenizer
from ridgeline.server.text_wire import IDS, Encode, Question

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
MAX_INFO_BYTES = 4 << 20


class Tokens(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct, frozen=True):
    prompt: str


def read_tokenize(body: Mapping[str, object], model: ServedModel) -> tuple[Question, bool]:
    """What to ask the tokenizer, and whether the tokens' texts are wanted. Raises ApiError."""
    if "messages" in body:
        chat = read(body, TokenizeChat)
        model.check_name(chat.model)
        return conversation_question(conversation_of(chat), model), chat.return_token_strs
    text = read(body, TokenizeText)
    model.check_name(text.model)
    need_tokenizer(model, "prompt")
    # As for a completion: the tokenizer is not there to count megabytes.
    most = model.ready.max_servable_tokens
    return Encode((text.prompt,), text.add_special_tokens, most), text.return_token_strs


def tokens(encoded: bytes, model: ServedModel, wants_texts: bool) -> bytes:
    """The answer, from an array of token ids."""
    ids = array(IDS, encoded).tolist()
    texts = [model.texts.text_of(i) for i in ids] if wants_texts else None
    return msgspec.json.encode(Tokens(len(ids), model.max_model_len, ids, texts))


def tokenizer_info(model: ServedModel) -> bytes:
    """What the model's folder says of its tokenizer, and the chat template if it lies beside."""
    found: dict[str, object] = {}
    path, template = model.folder / CONFIG, model.folder / TEMPLATE
    try:
        if path.is_file():
            found = parse_object(read_bytes(path, MAX_INFO_BYTES), path)
        if "chat_template" not in found and template.is_file():
            found["chat_template"] = read_bytes(template, MAX_INFO_BYTES).decode()
    except (ConfigError, UnicodeDecodeError):
        raise ApiError("not_found", "what this model says of its tokenizer is unusable") from None
    return msgspec.json.encode({"tokenizer_class": None, **found})


def detokenize(body: Mapping[str, object], model: ServedModel) -> bytes:
    """The text of token ids, special tokens shown. Raises ApiError."""
    asked = read(body, DetokenizeBody)
    model.check_name(asked.model)
    most = model.ready.max_servable_tokens
    if len(asked.tokens) > most:  # a million would keep a thread of completions for a second
        raise ApiError(
            "context_length_exceeded",
            f"tokens has {len(asked.tokens)} ids, more than the {most} that can be served; send "
            "fewer",
            "tokens",
        )
    try:
        ids = check_prompt(asked.tokens, model.ready.vocab_size)
    except RequestFault as fault:
        raise from_fault(fault, {"prompt": "tokens"}) from None
    vocabulary = need_tokenizer(model, "tokens")
    return msgspec.json.encode(Text(vocabulary.decode(ids, skip_special_tokens=False)))
