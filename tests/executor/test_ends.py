"""Steps in which few of many tokens sample, many of them, or none, captured or not."""

from __future__ import annotations

from functools import cache

import pytest

from ridgeline.attention.paged import PagedAttention
from ridgeline.executor import mixed_graphs
from ridgeline.layers.decoder import Decoder
from ridgeline.request import SamplingParams
from tests.executor.rig import Host, alone, make_decoder, make_executor

GREEDY = SamplingParams(temperature=0.0)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=2)
NAMES = "abcdefghij"


@cache
def decoder() -> Decoder:
    return make_decoder(
        seed=2, attention=PagedAttention(), hidden_size=24, head_dim=16, num_hidden_layers=2
    )


def host(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> Host:
    monkeypatch.setattr(mixed_graphs, "LOGITS_BUCKETS", (2, 4))
    monkeypatch.setattr(mixed_graphs, "DECODE_BUCKETS", (0, 3, 16))
    return Host(make_executor(decoder(), max_captured_rows=4, max_captured_tokens=max_tokens))


def check(made: Host) -> None:
    for name, held in made.held.items():
        got = made.output(name)
        assert got == alone(decoder(), held.prompt, held.sampling, len(got), name), name


@pytest.mark.parametrize("max_tokens", [0, 64])
@pytest.mark.parametrize("num_ends", range(6))
def test_any_number_of_prompts_ends(
    num_ends: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = host(monkeypatch, max_tokens)
    for i, name in enumerate(NAMES[:6]):
        made.add(name, range(i, i + 6), GREEDY)
    made.run({name: 6 if i < num_ends else 5 for i, name in enumerate(NAMES[:6])})
    assert [len(made.output(name)) for name in NAMES[:6]] == [1] * num_ends + [0] * (6 - num_ends)
    made.run(dict.fromkeys(NAMES[:6], 1))
    made.run(dict.fromkeys(NAMES[:6], 1))
    check(made)


@pytest.mark.parametrize("max_tokens", [0, 64])
@pytest.mark.parametrize("num_decodes", [1, 3, 4, 6])
def test_decodes_beside_them(
    num_decodes: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = host(monkeypatch, max_tokens)
    for i, name in enumerate(NAMES):
        made.add(name, range(i, i + 6), GREEDY)
    decodes, others = NAMES[:num_decodes], NAMES[num_decodes:]
    made.run(dict.fromkeys(decodes, 6))
    made.run({**dict.fromkeys(others, 5), **dict.fromkeys(decodes, 1)})  # none ends
    made.run({**dict.fromkeys(decodes, 1), others[0]: 1})  # one of them does
    made.run(dict.fromkeys([*others[1:], *decodes, others[0]], 1))
    check(made)


@pytest.mark.parametrize("max_tokens", [0, 64])
def test_a_prompt_that_is_scored_has_all_its_states(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others, and in steps of which it needs none any more."""
    made = host(monkeypatch, max_tokens)
    made.add("scored", range(7), SCORED)
    made.add("other", range(3, 30), GREEDY)
    first = made.run({"other": 20, "scored": 4})
    second = made.run({"scored": 3, "other": 7})
    made.run({"scored": 1, "other": 1})
    check(made)
    found = [*first.prompt_logprobs["scored"], *second.prompt_logprobs["scored"]]
    assert [record.token_id for record in found] == list(range(1, 7))
    lone = Host(make_executor(decoder()))
    lone.add("scored", range(7), SCORED)
    want = lone.run({"scored": 7}).prompt_logprobs["scored"]
    assert [r.logprob for r in found] == pytest.approx([r.logprob for r in want], abs=1e-4)
