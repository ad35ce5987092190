"""A toy of each extension kind answers a prompt through the whole engine, on a CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ridgeline import LLM, ConfigError, SamplingParams
from ridgeline.architectures import FAMILIES, expected_tensors, read_spec
from ridgeline.attention import ATTENTION_BACKENDS
from ridgeline.formats import DRAFT_METHODS, KV_FORMATS, POLICIES, WEIGHT_FORMATS
from ridgeline.parsers import GENERIC, PARSERS, find_parser, parser_class
from ridgeline.parsers.parser import Kind
from ridgeline.step import Listener, StepRecord
from tests.captures import records
from tests.extensions import toy_draft, toy_kv_format, toy_weight_format
from tests.tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ([3, 14, 15, 92, 65], [3, 14, 15, 92, 7, 8, 9])


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="cpu", num_blocks=40, block_size=4, max_model_len=64, **options)


def answers(folder: Path, **options: Any) -> list[list[int]]:
    llm = opened(folder, **options)
    return [result.token_ids for result in llm.generate(list(PROMPTS), GREEDY)]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "plain", hidden_size=32, head_dim=16, num_attention_heads=2)


def test_a_family_from_outside_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Mapping[str, object] = {
        "model_type": "toy",
        "symbols": 97,
        "width": 32,
        "heads": 4,
        "depth": 4,
        "look_back": 3,
        "longest": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="toy"):
        answers(tmp_path)
    monkeypatch.setitem(FAMILIES, "toy", "tests.extensions.toy_architecture:read")
    noise = torch.Generator().manual_seed(0)
    tensors = {
        name: float(len(shape) == 1) + 0.2 * torch.randn(shape, generator=noise)
        for name, shape in expected_tensors(read_spec(config)).items()
    }
    save_file(tensors, str(tmp_path / "model.safetensors"))
    llm = LLM(str(tmp_path), device="cpu", num_blocks=60, block_size=4)
    for prompt, result in zip(PROMPTS, llm.generate(list(PROMPTS), GREEDY), strict=True):
        ids = list(prompt)
        for token in result.token_ids:  # windows and groups agree with a pass over everything
            assert token == int(llm.logits(ids)[-1].argmax())
            ids.append(token)


def test_an_attention_backend_from_outside_is_served(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "tests.extensions.toy_attention:TextbookAttention"
    monkeypatch.setitem(ATTENTION_BACKENDS, "toy", where)
    assert answers(plain, attention_backend="toy") == answers(plain)


def test_a_weight_format_from_outside_is_served(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WEIGHT_FORMATS, "toy_int8", toy_weight_format.LINE)
    rounded = LLM(str(plain), device="cpu", num_blocks=40, weight_format="toy_int8")
    whole = LLM(str(plain), device="cpu", num_blocks=40)
    assert rounded.memory[0].predicted < whole.memory[0].predicted
    near = rounded.logits(PROMPTS[1]) - whole.logits(PROMPTS[1])
    assert 0 < near.norm() < 0.1 * whole.logits(PROMPTS[1]).norm()
    assert len(rounded.generate(list(PROMPTS), GREEDY)[0].token_ids) == 12


def test_a_kv_format_from_outside_is_served(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KV_FORMATS, "toy_int8", toy_kv_format.LINE)
    small = LLM(str(plain), device="cpu", num_blocks=40, kv_cache_dtype="toy_int8")
    whole = LLM(str(plain), device="cpu", num_blocks=40)
    assert small.memory[1].measured is not None
    assert whole.memory[1].measured is not None
    assert small.memory[1].predicted == small.memory[1].measured < whole.memory[1].measured
    got = [result.token_ids for result in small.generate(list(PROMPTS), GREEDY)]
    wanted = answers(plain)
    assert got[0][0] == wanted[0][0]
    assert [len(ids) for ids in got] == [12, 12]


def test_a_policy_from_outside_is_served(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "toy", "tests.extensions.toy_policy:ShortestFirst")
    assert answers(plain, policy="toy", max_num_seqs=1) == answers(plain)


class Drafts(Listener):
    """Counts the drafts that were checked."""

    def __init__(self) -> None:
        self.num_accepted = self.num_rejected = 0

    def on_step(self, record: StepRecord) -> None:
        self.num_accepted += sum(output.num_accepted for output in record.outputs)
        self.num_rejected += sum(output.num_rejected for output in record.outputs)


@records
def test_a_draft_method_from_outside_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(
        tmp_path, hidden_size=32, head_dim=16, num_attention_heads=2, vocab_size=16
    )  # so few tokens that they come back
    with pytest.raises(ConfigError, match="toy"):
        opened(folder, speculate="toy:3")
    monkeypatch.setitem(DRAFT_METHODS, "toy", toy_draft.LINE)
    greedy = GREEDY.replace(max_tokens=40)
    sampling = [greedy, greedy.replace(temperature=0.6, seed=5)]
    tokens = {}
    for speculate in ("off", "toy:3", "toy"):
        llm, draft_tokens = opened(folder, speculate=speculate), Drafts()
        llm.engine.listeners.append(draft_tokens)
        results = llm.generate([[3, 14, 15, 9, 6], [3, 14, 15, 9, 7, 8]], sampling)
        tokens[speculate] = [result.token_ids for result in results]
        if speculate == "toy:3":
            assert min(draft_tokens.num_accepted, draft_tokens.num_rejected) > 10
    assert tokens["toy:3"] == tokens["toy"] == tokens["off"]


def test_a_parser_from_outside_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'I ask.\ncall f: {"a": [1]}\ncall me: {}'
    assert find_parser(["Write call NAME: {...}"]) == GENERIC
    table = {"toy": "tests.extensions.toy_parser:ToyCalls", **PARSERS}
    monkeypatch.setattr("ridgeline.parsers.PARSERS", table)
    assert find_parser(["Write call NAME: {...}"]) == "toy"
    for pieces in ([text], list(text)):
        parser = parser_class("toy")({"f": {}})
        found = [piece for part in map(parser.feed, pieces) for piece in part] + parser.finish()
        assert [p.text for p in found if p.kind is Kind.CALL] == ["f"]
        assert "".join(p.text for p in found if p.kind is Kind.ARGUMENTS) == '{"a": [1]}'
        assert "".join(p.text for p in found if p.kind is Kind.CONTENT) == "I ask.call me: {}"
