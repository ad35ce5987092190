"""How much text does /tokenize take on, in the processes that completions need too?"""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.server.text_process import Worker
from ridgeline.server.text_wire import Encode, Ids, Refusal
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.fake_build import MAX_MODEL_LEN
from tests.server.running import Running


@pytest.fixture
def worker(fake_model: Path) -> Worker:
    tokenizer = load_tokenizer(fake_model)
    assert tokenizer is not None
    return Worker(tokenizer, None, lambda answer: None)


def test_a_hopeless_text_is_refused_by_its_beginning(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, lengths = Tokenizer.encode, list[int]()

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    answer = worker.answer(Encode(("x", "x" * 4_000_000), True, MAX_MODEL_LEN))
    assert isinstance(answer, Refusal)
    assert (answer.code, answer.param) == ("context_length_exceeded", "prompt")
    assert answer.place == 1
    assert f"more than the {MAX_MODEL_LEN} tokens" in answer.message
    assert sum(lengths) <= 8 * MAX_MODEL_LEN


def test_a_text_that_is_only_too_long_is_counted(worker: Worker) -> None:
    """So that a client sees by how much."""
    answer = worker.answer(Encode(("x" * 1000,), True, MAX_MODEL_LEN))
    assert isinstance(answer, Ids)
    assert len(answer.prompts[0]) == 4 * 1001


def test_over_the_wire_it_is_a_400(server: Running) -> None:
    with server.http as http:
        reply = http.post("/tokenize", json={"prompt": "x" * 3_000_000})
        short = http.post("/tokenize", json={"prompt": "x" * 1000}).json()
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"{MAX_MODEL_LEN} tokens" in error["message"]
    assert (short["count"], short["max_model_len"]) == (1001, MAX_MODEL_LEN)
