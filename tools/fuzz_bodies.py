"""Does any JSON body get past the readers of requests with another end than a call or a refusal?

The first byte of a case chooses the route, and the rest is the body.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ridgeline.declared import Declared, declared
from ridgeline.errors import RequestFault
from ridgeline.server.auth import Tenant
from ridgeline.server.bodies import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChat,
    TokenizeText,
)
from ridgeline.server.chat import read_chat
from ridgeline.server.errors import MAX_ECHO, ApiError
from ridgeline.server.json_body import parse_object
from ridgeline.server.model import ServedModel, TokenTexts
from ridgeline.server.parsed_request import ParsedRequest, read_completion
from ridgeline.server.prepare import prepare, question_of
from ridgeline.server.text_process import Worker
from ridgeline.server.text_wire import Question, Refusal
from ridgeline.server.tokenize import detokenize, read_tokenize, tokens
from ridgeline.server.wire import Ready
from ridgeline.text.chat import load_chat_template
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.model_folder import SPECIAL, write_model_folder
from tools.fuzz import Target

Body = Mapping[str, object]
MAX_DEPTH = 16
MAX_LEN = 64
MAX_SEQUENCES = 4
VOCABULARY = 256 + len(SPECIAL)
NUMBERS = (
    0, 1, -1, 2, 3, 0.5, 1.5, -0.0, 1e-300, 1e308, 5, 20, 21, 64, 255, 262, 1 << 31, 1 << 63,
    -1 << 63, 1 << 64, 10**40, 1e16, 100.0,
)  # fmt: skip
TEXTS = (
    "", " ", "hello", "fake", "user", "assistant", "system", "text", "none", "auto", "\0", "\ud800",
    "\U0001f600", "e\u0301", "<|eos|>", "a" * 65, "a" * 129, "word " * 200, "0", "7", "007", "-1",
    "1e3", "image_url", "\u202e", "\ufeff", "{{ x }}", "{% for i in x %}",
)  # fmt: skip


@functools.cache
def text() -> tuple[Tokenizer | None, Worker]:
    """What a process of the server has, in this one."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name))
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        worker = Worker(tokenizer, load_chat_template(folder, tokenizer), lambda _: None)
    return tokenizer, worker


@functools.cache
def model() -> ServedModel:
    ready = Ready(0, "", "fake", VOCABULARY, MAX_LEN, 4, 16, 4, (257,), (), (), 0, MAX_LEN)
    tokenizer, _ = text()
    return ServedModel(("fake",), 0, ready, tokenizer, True, TokenTexts(tokenizer), Path())


def _encoded(question: Question | None) -> tuple[bytes, ...]:
    if question is None:
        return ()
    found = text()[1].answer(question)
    if isinstance(found, Refusal):
        raise RequestFault(found.message, param=found.param, code=found.code)
    return found.prompts


def _tokenized(body: Body) -> None:
    question, wants_texts = read_tokenize(body, model())
    tokens(_encoded(question)[0], model(), wants_texts)


def _completion(body: Body) -> ParsedRequest:
    return read_completion(body, model().defaults, MAX_SEQUENCES)


def _chat(body: Body) -> ParsedRequest:
    return read_chat(body, model().defaults, MAX_SEQUENCES)


def _answered(read: Callable[[Body], ParsedRequest], body: Body) -> None:
    call = read(body)
    model().check_name(call.body.model)
    prepared = prepare(call, model(), _encoded(question_of(call, model())), "req-0", Tenant(), 0.0)
    assert 1 <= prepared.num_sequences <= MAX_SEQUENCES
    assert 1 <= prepared.num_prompt_tokens <= MAX_SEQUENCES * MAX_LEN


ROUTES: tuple[tuple[Callable[[Body], object], type[Struct]], ...] = (
    (functools.partial(_answered, _completion), CompletionBody),
    (functools.partial(_answered, _chat), ChatBody),
    (_tokenized, TokenizeText),
    (_tokenized, TokenizeChat),
    (lambda body: detokenize(body, model()), DetokenizeBody),
)


def _anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice((None, True, False))
    count = rng.choice((0, 1, 2, 5))
    if kind < 7:
        return [_anything(rng, depth + 1) for _ in range(count)]
    return {
        rng.choice((*TEXTS, "type", "content")): _anything(rng, depth + 1) for _ in range(count)
    }


def _value(rng: random.Random, name: str, fields: Declared, odd: float) -> Any:
    """Of a declared field; usually one that it may have."""
    if rng.random() < odd:
        return _anything(rng)
    field = fields[name]
    if name == "model":
        return "fake"
    if field.kind == "list of objects":
        return [_object(rng, field.fields or {}, odd, 1.0) for _ in range(rng.choice((1, 1, 2, 4)))]
    if field.kind == "object":
        return _object(rng, field.fields or {}, odd, 0.7) if field.fields else {"7": 1.5, "65": -2}
    if name == "role":
        return rng.choice(("system", "user", "user", "assistant", "developer"))
    if name == "tokens":
        return [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 5, MAX_LEN, MAX_LEN + 1)))]
    if field.kind == "boolean":
        return rng.random() < 0.5
    if field.kind in ("integer", "number"):
        low, high = field.low or 0, field.high or 0
        value = rng.choice((low, high, 1, 2, low - 1, high + 1, (low + high) / 2))
        return int(value) if field.kind == "integer" else value
    if "list of token ids" in field.kind and rng.random() < 0.5:
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 3, MAX_LEN)))]
        return rng.choice((ids, [ids, ids], ["a", ids]))
    if name == "content" and field.fields and rng.random() < 0.3:
        return [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.choice((1, 3)))]
    if field.kind == "list of integers":
        return [rng.randrange(VOCABULARY)]
    return rng.choice(("hello", "word", *TEXTS))


def _object(rng: random.Random, fields: Declared, odd: float, share: float) -> dict[str, Any]:
    """The required fields, and others with the chance `share`."""
    names = [n for n, f in fields.items() if f.required or rng.random() < share]
    made = {n: _value(rng, n, fields, odd) for n in names if rng.random() > odd / 4}
    if rng.random() < odd:
        made[rng.choice(TEXTS)] = _anything(rng)
    return made


def _damage(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del changed[at : at + rng.choice((1, 8, 1000))]
        elif kind == 2:
            changed[at:at] = rng.choice(
                (b"[" * 20, b"{", b'"', b"\\u", b"\\ud800", b"1e999", b"-", b"NaN")
            )
        else:
            start = rng.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + rng.choice((5, 50))]
    return bytes(changed)


def make(rng: random.Random) -> bytes:
    route = rng.randrange(len(ROUTES))
    kind = ROUTES[route][1]
    unsupported = tuple(UNSUPPORTED.get(kind, ()))
    odd = rng.choice((0.0, 0.0, 0.05, 0.3))
    body = _object(rng, declared(kind), odd, rng.choice((0.0, 0.1, 0.3)))
    if unsupported and rng.random() < 0.2:
        body[rng.choice(unsupported)] = _anything(rng)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return bytes([route]) + (_damage(rng, data) if rng.random() < 0.3 else data)


def check(case: bytes) -> None:
    use, _ = ROUTES[case[0] % len(ROUTES) if case else 0]
    try:
        use(parse_object(case[1:], MAX_DEPTH))
    except RequestFault:
        pass
    except ApiError as error:
        _check_refusal(error)


def _check_refusal(error: ApiError) -> None:
    assert 400 <= error.status < 500, error.code
    assert error.param is None or len(error.param) <= MAX_ECHO
    assert error.message.isprintable()
    told = json.loads(error.body())["error"]
    assert sorted(told) == ["code", "message", "param", "type"], told


bodies = Target(make, check)
