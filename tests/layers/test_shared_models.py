"""The small real models give the tokens and logits of their expected.json, in float32."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.layers.decoder import Decoder
from tests.layers.driving import Driver, greedy, load_decoder

MODELS = ("stories260K", "babyllama-char105", "babyllama-char105-moe4", "babyllama-char105-partner")
STEPS = 100  # of the 200 that are known; the whole engine runs them all elsewhere


@cache
def opened(folder: Path) -> tuple[Decoder, dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    decoder = load_decoder(config, tensors, max_model_len=config["max_position_embeddings"])
    return decoder, json.loads((folder / "expected.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(shared: Path, name: str) -> None:
    decoder, expected = opened(shared / "models" / name)
    known = {p["text"]: p for p in expected["prompts"]}
    prompts = {text: p["prompt_ids"] for text, p in known.items()}
    answers = greedy(Driver(decoder, block_size=16), prompts, STEPS)
    for text, answer in answers.items():
        wanted = known[text]["greedy_ids"][:STEPS]
        assert answer[: len(wanted)] == wanted, text


@pytest.mark.parametrize("name", MODELS)
def test_logits(shared: Path, name: str) -> None:
    decoder, expected = opened(shared / "models" / name)
    wanted = expected["logits_check"]
    logits = Driver(decoder).step({"a": wanted["prompt_ids"]})["a"].double()
    for place in wanted["positions"]:
        row = logits[place["position"]]
        assert row.logsumexp(-1).item() == pytest.approx(place["logsumexp"], abs=1e-4)
        assert row.norm().item() == pytest.approx(place["l2"], abs=1e-3)
        for token, value in place["top5"]:
            assert row[token].item() == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_of_a_story(shared: Path, name: str) -> None:
    decoder, expected = opened(shared / "models" / name)
    wanted = expected["logprob_check"]
    ids = wanted["ids"]
    logprobs = Driver(decoder).step({"a": ids})["a"].double().log_softmax(-1)
    chosen = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert chosen.sum().item() == pytest.approx(wanted["sum_logprob"], abs=1e-2)
    assert chosen[:16].tolist() == pytest.approx(wanted["first_16_token_logprobs"], abs=1e-4)
