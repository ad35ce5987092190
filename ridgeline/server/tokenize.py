"""What tokens is this text, and what text are these tokens? The two routes beside the API."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import msgspec

from ridgeline.server.chat import read_conversation
from ridgeline.server.declared import DETOKENIZE, TOKENIZE_CHAT, TOKENIZE_TEXT
from ridgeline.server.errors import ApiError
from ridgeline.server.fields import Fields, check_text
from ridgeline.server.model import ServedModel
from ridgeline.server.prepare import conversation_question, need_tokenizer
from ridgeline.server.sampling_fields import token_id
from ridgeline.server.text_wire import IDS, Encode, Question


class Tokens(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct, frozen=True):
    prompt: str


def read_tokenize(body: Mapping[str, object], model: ServedModel) -> tuple[Question, bool]:
    """What to ask the tokenizer, and whether the tokens' texts are wanted. Raises ApiError."""
    chat = "messages" in body
    fields = Fields(body, TOKENIZE_CHAT if chat else TOKENIZE_TEXT)
    fields.allow()
    model.check_name(fields.text("model") or "", required=False)
    wanted = bool(fields.flag("return_token_strs"))
    if chat:
        return conversation_question(read_conversation(fields), model), wanted
    fields.require("prompt")
    text = check_text(fields.text("prompt") or "", "prompt")
    special = fields.flag("add_special_tokens")
    need_tokenizer(model, "prompt")
    # As for a completion: the tokenizer is not there to count megabytes.
    most = model.ready.max_servable_tokens
    return Encode((text,), special is not False, most), wanted


def tokens(encoded: bytes, model: ServedModel, wants_texts: bool) -> bytes:
    """The answer, from an array of token ids."""
    ids = array(IDS, encoded).tolist()
    texts = [model.texts.text_of(i) for i in ids] if wants_texts else None
    return msgspec.json.encode(Tokens(len(ids), model.max_model_len, ids, texts))


def detokenize(body: Mapping[str, object], model: ServedModel) -> bytes:
    """The text of token ids, special tokens shown. Raises ApiError."""
    fields = Fields(body, DETOKENIZE)
    fields.allow()
    model.check_name(fields.text("model") or "", required=False)
    fields.require("tokens")
    values = fields.items("tokens") or []
    most = model.ready.max_servable_tokens
    if len(values) > most:  # a million would keep a thread of completions for a second
        raise ApiError(
            "context_length_exceeded",
            f"tokens has {len(values)} ids, more than the {most} that can be served; send fewer",
            "tokens",
        )
    size = model.ready.vocab_size
    ids = [token_id(value, f"tokens[{i}]", size) for i, value in enumerate(values)]
    vocabulary = need_tokenizer(model, "tokens")
    return msgspec.json.encode(Text(vocabulary.decode(ids, skip_special_tokens=False)))
