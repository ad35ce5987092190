"""What tokens is this text, and what text are these tokens? The two routes beside the API."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ridgeline.request import SamplingParams
from ridgeline.server.calls import Call, Kind
from ridgeline.server.chat import read_conversation
from ridgeline.server.declared import DETOKENIZE, TOKENIZE_CHAT, TOKENIZE_TEXT
from ridgeline.server.errors import ApiError
from ridgeline.server.fields import Fields, check_text
from ridgeline.server.model import ServedModel
from ridgeline.server.prepare import encode_conversation, need_tokenizer, refuse_hopeless
from ridgeline.server.sampling_fields import token_id


class Tokens(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct, frozen=True):
    prompt: str


def tokenize(body: Mapping[str, object], model: ServedModel) -> bytes:
    """The token ids of a text or a conversation, and their number.

    Raises ApiError or RequestFault.
    """
    chat = "messages" in body
    fields = Fields(body, TOKENIZE_CHAT if chat else TOKENIZE_TEXT)
    fields.allow()
    model.check_name(fields.text("model") or "", required=False)
    ids = _conversation_ids(fields, model) if chat else _text_ids(fields, model)
    wanted = fields.flag("return_token_strs")
    texts = [model.texts.text_of(i) for i in ids] if wanted else None
    return msgspec.json.encode(Tokens(len(ids), model.max_model_len, ids, texts))


def _text_ids(fields: Fields, model: ServedModel) -> list[int]:
    fields.require("prompt")
    text = check_text(fields.text("prompt") or "", "prompt")
    special = fields.flag("add_special_tokens")
    tokenizer = need_tokenizer(model, "prompt")
    # As for a completion, whose threads these are: it would wait until megabytes are counted.
    refuse_hopeless(tokenizer, text, model.ready.max_servable_tokens)
    return tokenizer.encode(text, True if special is None else special)


def _conversation_ids(fields: Fields, model: ServedModel) -> list[int]:
    conversation = read_conversation(fields)
    call = Call(Kind.CHAT, model.name, (), conversation, SamplingParams(), {})
    return encode_conversation(call, model)


def detokenize(body: Mapping[str, object], model: ServedModel) -> bytes:
    """The text of token ids, special tokens shown.

    Raises ApiError.
    """
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
    tokenizer = need_tokenizer(model, "tokens")
    return msgspec.json.encode(Text(tokenizer.decode(ids, skip_special_tokens=False)))
