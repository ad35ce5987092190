"""How much text does /tokenize take on, in the threads that completions need too?"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ridgeline.errors import RequestFault
from ridgeline.server.model import ServedModel, load_text
from ridgeline.server.tokenize import Tokens, tokenize
from ridgeline.server.wire import Ready
from ridgeline.text.tokenizer import Tokenizer
from tests.server.fake_build import MAX_MODEL_LEN, VOCAB_SIZE
from tests.server.running import Running


@pytest.fixture
def model(fake_model: Path) -> ServedModel:
    ready = Ready(
        1, "", "fake", VOCAB_SIZE, MAX_MODEL_LEN, 16, 64, 8, (257,), (), (), 0, MAX_MODEL_LEN
    )
    text = load_text(fake_model)
    return ServedModel("fake", 0, ready, text.tokenizer, text.chat_template, text.texts)


def test_a_hopeless_text_is_refused_by_its_beginning(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, lengths = Tokenizer.encode, list[int]()

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    with pytest.raises(RequestFault, match=f"more than the {MAX_MODEL_LEN} tokens") as caught:
        tokenize({"prompt": "x" * 4_000_000}, model)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert sum(lengths) <= 8 * MAX_MODEL_LEN


def test_a_text_that_is_only_too_long_is_counted(model: ServedModel) -> None:
    """So that a client sees by how much."""
    answer = msgspec.json.decode(tokenize({"prompt": "x" * 1000}, model), type=Tokens)
    assert (answer.count, answer.max_model_len) == (1001, MAX_MODEL_LEN)


def test_over_the_wire_it_is_a_400(server: Running) -> None:
    with server.http as http:
        reply = http.post("/tokenize", json={"prompt": "x" * 3_000_000})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"{MAX_MODEL_LEN} tokens" in error["message"]
