"""Is the body parser as strict as it says, and no stricter?"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ridgeline.server.errors import ApiError
from ridgeline.server.json_body import parse_object, structure, too_deep

BAD = {
    "empty": b"",
    "blank": b"  \n ",
    "not JSON": b"hello",
    "half": b'{"a": 1',
    "trailing comma": b'{"a": 1,}',
    "trailing data": b'{"a": 1} {}',
    "trailing letter": b'{"a": 1}x',
    "comment": b'{"a": 1 /* no */}',
    "single quotes": b"{'a': 1}",
    "list": b"[1]",
    "string": b'"a"',
    "number": b"1",
    "null": b"null",
    "bad UTF-8": b'{"a": "\xff"}',
    "overlong UTF-8": b'{"a": "\xc0\xaf"}',
    "UTF-8 surrogate": b'{"a": "\xed\xa0\x80"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": Infinity}',
    "-Infinity": b'{"a": -Infinity}',
    "too large": b'{"a": 1e999}',
    "too small": b'{"a": -1e999}',
    "endless integer": b'{"a": ' + b"9" * 5000 + b"}",
    "same key": b'{"a": 1, "a": 2}',
    "same key, escaped": b'{"a": 1, "\\u0061": 2}',
    "same key below": b'{"a": {"b": 1, "b": 1}}',
    "65 levels": b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}",
    "bomb": b"[" * 100_000,
    "too many lists": b'{"a": [' + b"[]," * 65_536 + b"1]}",
    "object bomb": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "control character": b'{"a": "\x01"}',
    "leading zero": b'{"a": 01}',
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert caught.value.code == "invalid_json"
    assert caught.value.status == 400
    assert len(caught.value.message) < 200


GOOD: dict[str, tuple[bytes, Any]] = {
    "spaces": (b' \n{"a": 1} \t', {"a": 1}),
    "64 levels": (b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}", None),
    "brackets in text": (b'{"a": "' + b"[{" * 500 + b'"}', {"a": "[{" * 500}),
    "quotes and escapes": (
        b'{"a\\"[": "\\\\", "b": "\\\\\\"]", "c": "\\u005b"}',
        {'a"[': "\\", "b": '\\"]', "c": "["},
    ),
    "lone surrogate, judged later": (b'{"a": "\\ud800"}', {"a": "\ud800"}),
    "numbers": (b'{"a": -0.5e3, "b": 1E2, "c": 0}', {"a": -500.0, "b": 100.0, "c": 0}),
    "same key elsewhere": (b'{"a": {"a": 1}, "b": {"a": 2}}', {"a": {"a": 1}, "b": {"a": 2}}),
}


@pytest.mark.parametrize(("body", "value"), GOOD.values(), ids=GOOD.keys())
def test_accepted(body: bytes, value: Any) -> None:
    assert parse_object(body) == (json.loads(body) if value is None else value)


def random_value(rng: random.Random, depth: int) -> Any:
    kinds = ["text", "number", "null"] + (["list", "object"] if depth else [])
    kind = rng.choice(kinds)
    if kind == "text":
        return "".join(rng.choice('ab"\\[]{}\n\u00e9\U0001f600') for _ in range(rng.randrange(6)))
    if kind == "number":
        return rng.choice([0, -3, 2.5, 10**20])
    if kind == "list":
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == "object":
        return {f'k{i}"[': random_value(rng, depth - 1) for i in range(rng.randrange(4))}
    return None


def levels(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(levels, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(levels, value), default=0)
    return 0


def test_random_objects_and_their_depth() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        value = {"top": random_value(rng, 6)}
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        assert parse_object(body) == value
        depth = levels(value)
        assert not too_deep(structure(body), depth)
        assert too_deep(structure(body), depth - 1)
