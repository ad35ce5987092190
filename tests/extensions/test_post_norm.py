"""A family with norms in other places than a Llama's is one file and one table line, and all works:
logits, GGUF files, quantizing, KV formats, drafts, the memory contract and the cost."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.architectures import FAMILIES, read_spec
from ridgeline.architectures.counts import step_flops
from ridgeline.architectures.gguf import sources
from ridgeline.cli.inspect import facts
from ridgeline.compression.checkpoints import write_plain
from ridgeline.compression.rounding import METHODS
from ridgeline.compression.stream import Job, quantize_model
from ridgeline.cost.ops import step_ops
from ridgeline.formats import CHECKPOINT, KV_FORMATS
from tests.compression.test_stream import method, texts
from tests.extensions import toy_post_norm
from tests.layers.driving import Driver, TensorDict, build_decoder
from tests.layers.reference_models import VOCAB, ReferenceModel, tiny_config
from tests.loader.gguf_write import gguf_file, metadata_of
from tests.portable import only_portable

NAME = "toy_post_norm"
MAX_LINES = 45
CONFIG = tiny_config(NAME)
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 60, "block_size": 4}


@pytest.fixture(autouse=True)
def table_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a user would add beside the file."""
    monkeypatch.setitem(FAMILIES, NAME, "tests.extensions.toy_post_norm:read")


@cache
def olmo2() -> ReferenceModel:
    return ReferenceModel(CONFIG | {"model_type": "olmo2"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def write_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(olmo2().tensors, folder / "model.safetensors")
    return folder


def tokens(path: Path, **options: Any) -> list[int]:
    [result] = LLM(str(path), **OPTIONS | options).generate([IDS], GREEDY, progress=False)
    return list(result.token_ids)


def test_it_is_one_file_and_one_line() -> None:
    file = Path(toy_post_norm.__file__ or "")
    assert len(file.read_text().splitlines()) <= MAX_LINES
    package = Path(ridgeline.__file__ or "").parent
    assert not [path for path in package.rglob("*.py") if NAME in path.read_text()]


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_logits_are_those_of_transformers(backend: str) -> None:
    spec = read_spec(CONFIG)
    decoder = build_decoder(spec, max_model_len=64, backend=backend)
    decoder.load(TensorDict(olmo2().tensors))
    driver = Driver(decoder)
    steps = [driver.step({"a": IDS[:9], "b": IDS}), driver.step({"a": IDS[9:10]})]
    steps.append(driver.step({"a": IDS[10:]}))
    wanted = olmo2().logits(IDS)
    for found in (torch.cat([step["a"] for step in steps]), steps[0]["b"]):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_it_is_served_and_takes_what_was_predicted(folder: Path) -> None:
    llm = LLM(str(folder), **OPTIONS)
    [result] = llm.generate([IDS], GREEDY, progress=False)
    assert list(result.token_ids) == olmo2().greedy(IDS, 24)
    measured = {row.what: (row.measured, row.predicted) for row in llm.memory}
    assert measured["weights"][0] == measured["weights"][1]
    described = facts(read_spec(CONFIG))["order of a layer"]
    assert described == "attention, norm, add, feed-forward, norm, add"


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_every_kv_format(folder: Path, kv_format: str) -> None:
    llm = LLM(str(folder), kv_cache_dtype=kv_format, **OPTIONS)
    assert llm.memory[1].measured == llm.memory[1].predicted
    decoder = build_decoder(read_spec(CONFIG), max_model_len=64, kv_format=kv_format)
    decoder.load(TensorDict(olmo2().tensors))
    driver = Driver(decoder, kv_format=kv_format)
    driver.step({"a": IDS[:9]})
    wanted = olmo2().logits(IDS)[9:]
    apart = (driver.step({"a": IDS[9:]})["a"] - wanted).norm() / wanted.norm()
    assert apart < {"auto": 1e-5, "int4": 0.5}.get(kv_format, 0.1)


@pytest.mark.parametrize("speculate", ["ngram:3", "draft:{folder}:3", "early:2:3"])
def test_drafts_change_no_token(folder: Path, speculate: str) -> None:
    assert tokens(folder, speculate=speculate.format(folder=folder)) == tokens(folder)


def test_a_gguf_file_is_the_same_model(folder: Path) -> None:
    tensors = olmo2().tensors
    named = {source.name: tensors[name] for name, source in sources(read_spec(CONFIG)).items()}
    assert "blk.2.post_ffw_norm.weight" in named
    said = {key.replace("llama", NAME): value for key, value in metadata_of(CONFIG).items()}
    path = folder / "model.gguf"
    path.write_bytes(gguf_file(said | {"general.architecture": (8, NAME)}, named))
    torch.testing.assert_close(LLM(str(path), **OPTIONS).logits(IDS), olmo2().logits(IDS))


@pytest.mark.parametrize("how", METHODS)
def test_quantized_it_is_what_transformers_makes_of_the_dequantized_weights(
    folder: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_portable(monkeypatch)
    out, plain = tmp_path / "out", tmp_path / "plain"
    given = texts()
    found = quantize_model(Job(folder, out, method(how, folder), given)).quality
    write_plain(out, plain)
    loaded: dict[str, torch.Tensor] = {}
    for path in sorted(plain.glob("*.safetensors")):
        loaded |= load_file(path)
    model = ReferenceModel(olmo2().config).model
    model.load_state_dict(loaded)
    scored = given.is_scored_NS[:, 1:]
    p, q = (logs(one, given.held_out_NS)[scored] for one in (olmo2().model, model))
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert 1e-4 < found.kl < 1.0
    served = LLM(str(out), **OPTIONS)
    assert served.resolved.weight_format == CHECKPOINT
    torch.testing.assert_close(
        served.logits(IDS), LLM(str(plain), **OPTIONS).logits(IDS), atol=1e-4, rtol=1e-4
    )


def logs(model: Any, ids_NS: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(ids_NS).logits[:, :-1], -1)


def test_it_is_priced_as_it_is() -> None:
    spec = read_spec(CONFIG)
    shape = ((5, 3), (1, 20))
    ops = step_ops(spec, shape)
    products = sum(op.flops * op.count for op in ops)
    assert products == step_flops(spec, shape, 2)
    norms = sum(op.count for op in ops if op.name == "norm")
    assert norms == 2 * spec.num_layers
    assert spec.vocab_size == VOCAB
