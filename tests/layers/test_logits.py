"""Logits are float32 on every path: what would tie when rounded to 16 bits is told apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.cost.memory import graph_items
from ridgeline.cost.ops import step_ops
from ridgeline.cost.setup import Precision
from ridgeline.errors import ConfigError
from ridgeline.formats import WEIGHT_FORMATS, served
from ridgeline.kernels.cpu import native
from ridgeline.kernels.draw_rows import draw_rows
from ridgeline.quantization import WeightFormat, open_vocabulary_format
from tests.conftest import TEST_DEVICE
from tests.tiny_model import make_tiny_model, tiny_config

VOCABULARIES = sorted({WEIGHT_FORMATS[name].vocabulary for name in served(WEIGHT_FORMATS)})
LOW, HIGH = 7, 200  # rows of W: the second one's logit is a little larger


@pytest.fixture(params=["native", "torch"] if TEST_DEVICE == "cpu" else ["gpu"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    if native.library() is None and request.param == "native":
        pytest.skip("no native CPU kernels here")
    is_torch = request.param == "torch" and native.library() is not None
    with native.at_level("none") if is_torch else nullcontext():
        yield request.param


def near_twins(outputs: int, inputs: int) -> torch.Tensor:
    """W [outputs, inputs] whose rows LOW and HIGH differ in one number, all others being zeros."""
    weight = torch.zeros(outputs, inputs, dtype=torch.bfloat16, device=TEST_DEVICE)
    weight[[LOW, HIGH]] = 0.5
    weight[[LOW, HIGH], ::2] = 1.0
    weight[HIGH, 1] = 0.625
    return weight


def tying_input(exact_NK: torch.Tensor) -> torch.Tensor:
    """x [K] for which the logits of both rows are the same bfloat16, and not the same."""
    for step in range(64):
        x = torch.full((exact_NK.shape[1],), 1 + step / 128, device=exact_NK.device)
        low, high = (exact_NK[[LOW, HIGH]].double() @ x.double()).tolist()
        rounded = torch.tensor([low, high]).bfloat16()
        if low < high and rounded[0] == rounded[1]:
            return x.bfloat16()
    raise AssertionError("no such input")


def opened(name: str, *, deterministic: bool) -> WeightFormat:
    try:
        return open_vocabulary_format(name, deterministic=deterministic)
    except ConfigError:
        pytest.skip(f"{name} is not served deterministically")


@pytest.mark.parametrize(("outputs", "inputs"), [(272, 256), (4096, 1024)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_what_ties_in_16_bits_is_told_apart(
    kernels: str, name: str, deterministic: bool, outputs: int, inputs: int
) -> None:
    if kernels == "torch" and name == "plain" and not deterministic:
        pytest.skip("torch rounds products of 16 bits on a CPU; see multiply_into")
    vocabulary = opened(name, deterministic=deterministic)
    kept = vocabulary.finish({"weight": near_twins(outputs, inputs)})
    x_K = tying_input(vocabulary.dequantize(kept))
    for rows in (1, 6, 8, 20, 64, 70):
        for width in (outputs, outputs - 11):
            out = torch.full((rows, width), torch.nan, device=TEST_DEVICE)
            assert vocabulary.linear_into(x_K.expand(rows, -1).contiguous(), kept, out) is out
            assert not out.isnan().any()
            positions = torch.zeros(rows, dtype=torch.int64, device=TEST_DEVICE)
            ids, is_sound = draw_rows(out, positions, None)
            assert ids.tolist() == [HIGH] * rows, (rows, width)
            assert is_sound.all()


def test_float32_logits_are_counted() -> None:
    spec = read_spec(tiny_config(vocab_size=1000))
    for dtype in ("bfloat16", "float32"):
        ops = {op.name: op for op in step_ops(spec, ((1, 5),) * 3, precision=Precision(dtype))}
        assert ops["lm_head"].write_bytes == 3 * 1000 * 4
        assert ops["sampling"].read_bytes == 3 * 1000 * 4
    wide = read_spec(tiny_config(vocab_size=2000))
    sizes = [graph_items(one, 8, 0, 2)[0].bytes for one in (spec, wide)]
    assert sizes[1] - sizes[0] >= 8 * 1000 * 4


TIED = {0, 1}  # ids that only rounding makes the likeliest


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose logits are 16 * h0 (of id 0) and that a little more or less (of eight others),
    or the same of minus h0 (of id 1): neither is ever the likeliest, and both win where all tie."""
    folder = tmp_path_factory.mktemp("twins")
    make_tiny_model(folder, vocab_size=272, head_dim=16, tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    head, norm = torch.zeros(272, 32), torch.zeros(32)
    norm[0], norm[1:5] = 1.0, 2.0**-9
    more_or_less = torch.cat([torch.eye(4), -torch.eye(4)])
    for low, sign in enumerate((1.0, -1.0)):
        others = slice(2 + 8 * low, 10 + 8 * low)
        head[low, 0] = head[others, 0] = 16.0 * sign
        head[others, 1:5] = more_or_less
    save_file(tensors | {"model.norm.weight": norm, "lm_head.weight": head},
              str(folder / "model.safetensors"))  # fmt: skip
    return str(folder)


WAYS: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "first layers": {"speculate": "early:1:2"},
    "look-ups": {"speculate": "ngram:2"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_step_lets_16_bits_decide(twins: str, way: str) -> None:
    """Greedy, at a temperature so low that it is, with a filter and a penalty, with
    log-probabilities; alone and in a batch."""
    if TEST_DEVICE == "cpu" and (native.library() is None or way == "deterministic"):
        pytest.skip("torch rounds products of 16 bits on a CPU")
    asked = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-9, seed=1),
        SamplingParams(temperature=1e-9, seed=1, top_k=2),
        SamplingParams(temperature=0.0, presence_penalty=1e-9),
        SamplingParams(temperature=0.0, logprobs=1),
    ]
    asked = [one.replace(max_tokens=12, ignore_eos=True) for one in asked]
    options = {"speculate": "off"} | WAYS[way]
    with LLM(twins, device=TEST_DEVICE, dtype="bfloat16", num_blocks=64, **options) as llm:
        for many in (asked[:1], asked, asked * 4):
            prompts = [[7 + i, 50, 9] for i in range(len(many))]
            for result in llm.generate(prompts, many, progress=False):
                assert not result.error
                assert TIED.isdisjoint(result.token_ids)
