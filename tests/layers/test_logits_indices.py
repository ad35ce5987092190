"""States that nobody asks for are not computed behind the last attention, and no other changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.attention.layout import LogitsIndices
from ridgeline.attention.sdpa import SdpaAttention
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.hidden import Hidden, RMSNorm
from tests.layers.driving import Driver, build_decoder
from tests.layers.reference_models import VOCAB, tiny_config

CONFIGS = {
    "llama": tiny_config("llama"),
    "one layer": tiny_config("llama", num_hidden_layers=1),
    "mistral window": tiny_config("mistral", sliding_window=5),
    "qwen3": tiny_config("qwen3"),
    "gelu": tiny_config("llama", hidden_act="gelu_pytorch_tanh"),
    "mixtral": tiny_config("mixtral"),
}
PROMPTS = {"a": 1, "b": 23, "c": 6}  # tokens 0, 1 .. 23, 24 .. 29
WANTED = {"ends": [0, 23, 29], "one": [23], "any order": [29, 3, 4, 0], "none": []}


def drivers(name: str, num: int, backend: str = "auto") -> Iterator[Driver]:
    spec = read_spec(CONFIGS[name], max_model_len=128)
    decoder = build_decoder(spec, max_model_len=128, backend=backend)
    decoder.randomize(7)
    for _ in range(num):
        driver = Driver(decoder, poison=False)
        for store in driver.kv.stores:
            for tensor in store:
                tensor.zero_()
        yield driver


def prompts() -> dict[str, list[int]]:
    rng = random.Random(3)
    return {name: [rng.randrange(3, VOCAB) for _ in range(n)] for name, n in PROMPTS.items()}


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("name", CONFIGS)
def test_wanted_states_are_those_of_a_whole_step(name: str, wanted: str) -> None:
    ours, whole = drivers(name, 2)
    batch = ours.batch(prompts())
    places = torch.tensor(WANTED[wanted], dtype=torch.int64, device=ours.decoder.device)
    got = ours.decoder.forward(replace(batch, logits_indices=LogitsIndices(places)), ours.kv)
    want = whole.decoder.forward(whole.batch(prompts()), whole.kv)
    assert got.shape == (len(places), want.shape[1])
    torch.testing.assert_close(got, want[places], rtol=1e-4, atol=1e-5)
    more = {"b": [5, 6], "a": [7]}  # what the next step finds in the cache
    for name_, logits in ours.step(more).items():
        torch.testing.assert_close(logits, whole.step({name_: more[name_]})[name_])


@pytest.mark.parametrize("name", CONFIGS)
def test_filling_the_cache_is_all_that_filling_does(name: str) -> None:
    ours, whole = drivers(name, 2)
    ours.decoder.fill(ours.batch(prompts()), ours.kv)
    whole.step(prompts())
    for mine, theirs in zip(ours.kv.stores, whole.kv.stores, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("wanted", "rows"), [([0, 23, 29], 3), ([], 0), (None, 30)])
def test_the_last_layer_works_for_wanted_tokens_alone(
    wanted: list[int] | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the layers before it for all."""
    (driver,) = drivers("llama", 1)
    decoder, seen = driver.decoder, list[int]()
    for layer in decoder.layers:
        count_rows(layer.feed_forward, seen, monkeypatch)
    batch = driver.batch(prompts())
    if wanted is not None:
        batch.logits_indices = LogitsIndices(
            torch.tensor(wanted, dtype=torch.int64, device=decoder.device)
        )
    decoder.forward(batch, driver.kv)
    assert seen == [30] * (len(decoder.layers) - 1) + [rows] * (rows > 0)


def count_rows(inner: object, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    of = type(inner).__call__

    def counted(self: object, hidden: Hidden, *norms: RMSNorm | None) -> None:
        if self is inner:
            seen.append(len(hidden.sum_TE))
        of(self, hidden, *norms)

    monkeypatch.setattr(type(inner), "__call__", counted)


def test_of_early_layers_it_is_the_last_of_those() -> None:
    ours, whole = drivers("llama", 2)
    decoder: Decoder = ours.decoder
    places = torch.tensor([29, 0], device=decoder.device)
    batch = replace(ours.batch(prompts()), logits_indices=LogitsIndices(places))
    out = torch.empty(30, VOCAB, device=decoder.device)
    got = decoder.forward_logits(batch, ours.kv, out[:2], num_layers=2)
    want = decoder.forward_logits(whole.batch(prompts()), whole.kv, out.clone(), num_layers=2)
    torch.testing.assert_close(got, want[places], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("before", [0, 11])
@pytest.mark.parametrize("num_new", [1, 8, 9, 40])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_the_last_token_of_one_prompt_alone(
    backend: str, name: str, num_new: int, before: int
) -> None:
    """Also behind others of it, and where it sees a window of them."""
    rng = random.Random(num_new)
    ours, whole = drivers(name, 2, backend)
    ids = [rng.randrange(3, VOCAB) for _ in range(before + num_new)]
    if before:
        for driver in (ours, whole):
            driver.step({"a": ids[:before]})
    batch = ours.batch({"a": ids[before:]})
    place = torch.tensor([num_new - 1], device=ours.decoder.device)
    batch.logits_indices = LogitsIndices(place, is_last=True)
    got = ours.decoder.forward(batch, ours.kv)
    want = whole.decoder.forward(whole.batch({"a": ids[before:]}), whole.kv)
    torch.testing.assert_close(got, want[-1:], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(ours.kv.stores, whole.kv.stores, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other)


def test_attention_of_the_last_layer_is_asked_for_the_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (driver,) = drivers("llama", 1, "sdpa")
    seen, attend = list[int](), SdpaAttention.attend_last

    def counted(self: SdpaAttention, q_1HD: torch.Tensor, *about: Any) -> torch.Tensor | None:
        out = attend(self, q_1HD, *about)
        assert out is not None
        seen.append(len(out))
        return out

    monkeypatch.setattr(SdpaAttention, "attend_last", counted)
    place = torch.tensor([19], device=driver.decoder.device)
    for num_new, wanted in ((20, LogitsIndices(place, is_last=True)), (20, None)):
        batch = driver.batch({f"a{wanted is None}": list(range(3, 3 + num_new))})
        batch.logits_indices = wanted
        driver.decoder.forward(batch, driver.kv)
    assert seen == [1]
