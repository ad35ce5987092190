"""Checkpoints that public tools have quantized hold the same numbers here, and say the same words.

Made by tests/loader/stored_files/make.py: the tensors by the tools named there, `expected.json` and
`expected.safetensors` by them and by Transformers with the numbers that the tool reads.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.architectures.counts import weight_bytes
from ridgeline.architectures.scheme_config import is_quantized, matrix_schemes
from ridgeline.architectures.spec import ModelSpec
from ridgeline.distributed.placement import Placement
from ridgeline.errors import ConfigError
from ridgeline.formats import CHECKPOINT
from ridgeline.loader import open_checkpoint, read_config
from ridgeline.loader.parallel import ParallelSource
from ridgeline.loader.quantized_checkpoint import UnpackedSource, check_model
from tests.conftest import TEST_DEVICE
from tests.distributed.alone import Alone
from tests.layers.driving import build_decoder
from tests.portable import only_portable

FILES = Path(__file__).parent / "stored_files"
NAMES = sorted(path.name for path in FILES.iterdir() if (path / "config.json").exists())
KEPT = [name for name in NAMES if not name.startswith("bnb")]
NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@cache
def told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
    return found


def source_of(folder: Path) -> tuple[ModelSpec, UnpackedSource]:
    spec, checkpoint = read_spec(read_config(folder)), open_checkpoint(folder)
    check_model(checkpoint, spec, folder)
    return spec, UnpackedSource(checkpoint, matrix_schemes(spec))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def served(name: str, **changes: Any) -> LLM:
    options: dict[str, Any] = {"dtype": "float32", "device": TEST_DEVICE, "num_blocks": 64}
    return LLM(str(FILES / name), **(options | changes))


def tokens(llm: LLM, name: str) -> list[int]:
    [result] = llm.generate([told()[name]["prompt"]], GREEDY, progress=False)
    return list(result.token_ids)


def test_there_are_models_of_every_method() -> None:
    methods = {read_config(FILES / name)["quantization_config"]["quant_method"] for name in NAMES}  # type: ignore[index]
    assert methods == {"compressed-tensors", "gptq", "awq", "fp8", "bitsandbytes"}
    assert set(told()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_the_tool_bit_for_bit(name: str) -> None:
    spec, source = source_of(FILES / name)
    assert is_quantized(spec) == (name in KEPT)
    dtype = getattr(torch, told()[name]["dtype"])
    digests = told()[name]["sha256"]
    assert {one.name for one in matrix_schemes(spec)} == set(digests)
    for matrix in matrix_schemes(spec):
        got = source.tensor(matrix.name)
        assert got.shape == (matrix.rows, matrix.columns)
        assert digest(got.to(dtype)) == digests[matrix.name], matrix.name
        for dim, size in enumerate(got.shape):
            start, length = size // 3, size - size // 2
            part = source.slice(matrix.name, dim, start, length)
            assert torch.equal(part, got.narrow(dim, start, length)), matrix.name


@pytest.mark.parametrize("name", NAMES)
def test_unpacked_it_says_what_transformers_does(name: str) -> None:
    llm = served(name, weight_format="plain")
    want = load_file(FILES / "expected.safetensors")[name]
    got = llm.logits(told()[name]["prompt"])[-len(want) :].cpu()
    # The tool's numbers are rounded to the dtype of its scales, ours are not.
    torch.testing.assert_close(got, want, atol=told()[name]["atol"], rtol=0)
    assert tokens(llm, name) == told()[name]["greedy"]
    said = [one.because for one in llm.resolved.decisions]
    assert any("unpacked" in because for because in said)


@pytest.mark.parametrize("name", KEPT)
def test_kept_as_stored_it_says_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_portable(monkeypatch)
    llm = served(name)
    assert llm.resolved.weight_format == CHECKPOINT
    assert tokens(llm, name) == told()[name]["greedy"]
    unpacked = served(name, weight_format="plain")
    prompt = told()[name]["prompt"]
    torch.testing.assert_close(llm.logits(prompt), unpacked.logits(prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KEPT)
def test_it_takes_the_memory_that_was_predicted(name: str) -> None:
    llm = served(name, dtype="bfloat16")
    [weights] = [row for row in llm.memory if row.what == "weights"]
    assert weights.measured == weights.predicted
    assert weights.predicted < weight_bytes(llm.spec, 2)
    [said] = [one for one in llm.resolved.decisions if one.field == "weight_format"]
    assert (said.asked, said.got) == ("auto", CHECKPOINT)


@pytest.mark.parametrize("name", KEPT)
def test_the_fastest_homes_are_near(name: str) -> None:
    """Those that round x: the direction of the logits is the same."""
    llm = served(name)
    want = load_file(FILES / "expected.safetensors")[name].float()
    got = llm.logits(told()[name]["prompt"])[-len(want) :].cpu()
    assert torch.cosine_similarity(got, want, -1).min() > 0.995


@pytest.mark.parametrize("asked", ["int8", "fp8"])
def test_another_format_rounds_the_unpacked_numbers(asked: str) -> None:
    llm = served(NAMES[0], weight_format=asked)
    assert llm.resolved.weight_format == asked
    said = [one.because for one in llm.resolved.decisions if one.field == "weight_format"]
    assert any("unpacked to float32 first" in because for because in said)
    assert len(tokens(llm, NAMES[0])) == NUM_TOKENS


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-int8"])
def test_what_no_format_keeps_is_served_as_numbers(name: str) -> None:
    llm = served(name)
    assert llm.resolved.weight_format == "plain"
    [said] = [one for one in llm.resolved.decisions if one.field == "unpacked weights"]
    assert "model.layers.0.self_attn.q_proj.weight and 6 more" in said.because
    [weights] = [row for row in llm.memory if row.what == "weights"]
    assert weights.measured == weights.predicted == weight_bytes(llm.spec, 4)
    assert tokens(llm, name) == told()[name]["greedy"]
    with pytest.raises(ConfigError, match="no quantized matrices"):
        served(name, weight_format="checkpoint")


# ------------------------------------------------------------------------ refusals


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a GPTQ model, to be damaged."""
    name = next(name for name in NAMES if name.startswith("gptq"))
    return Path(shutil.copytree(FILES / name, tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Of the first layer's q_proj; None: gone."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for suffix, tensor in changes.items():
        name = f"model.layers.0.self_attn.q_proj.{suffix}"
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        LLM(str(folder), device=TEST_DEVICE, num_blocks=64)
    return str(raised.value)


def test_a_missing_tensor_and_one_of_another_size_or_dtype_are_named(model: Path) -> None:
    scales = load_file(model / "model.safetensors")["model.layers.0.self_attn.q_proj.scales"]
    change_tensors(model, scales=None)
    assert "lacks tensor 'model.layers.0.self_attn.q_proj.scales'" in refusal(model)
    change_tensors(model, scales=scales[:, :-1].contiguous())
    assert "q_proj.scales' has shape" in refusal(model)
    change_tensors(model, scales=torch.ones_like(scales, dtype=torch.float32))
    assert "scales of several dtypes" in refusal(model)
    change_tensors(model, scales=scales * torch.nan)
    assert "NaN or infinity" in refusal(model)


def test_an_order_that_the_config_does_not_tell_is_refused(model: Path) -> None:
    change_config(model, desc_act=False)
    name = "model.layers.0.self_attn.q_proj.g_idx"
    order = load_file(model / "model.safetensors")[name]
    change_tensors(model, g_idx=order.flip(0).contiguous())
    assert "desc_act of config.json is false; set it to true" in refusal(model)


def test_a_bias_of_zeros_is_none(model: Path) -> None:
    """AutoGPTQ writes them."""
    rows = read_spec(read_config(model)).layers[0].attention
    size = rows.num_heads * rows.head_dim
    change_tensors(model, bias=torch.zeros(size, dtype=torch.float16))
    LLM(str(model), device=TEST_DEVICE, num_blocks=64)
    change_tensors(model, bias=torch.ones(size, dtype=torch.float16))
    assert "holds tensor 'model.layers.0.self_attn.q_proj.bias'" in refusal(model)


def test_zeros_of_symmetric_codes_are_0(tmp_path: Path) -> None:
    """Older versions of compressed-tensors write them."""
    folder = Path(shutil.copytree(FILES / "ct-w8a8", tmp_path / "model"))
    change_config(folder, quantization_status="frozen")
    rows = read_spec(read_config(folder)).layers[0].attention
    zero = torch.zeros(rows.num_heads * rows.head_dim, 1, dtype=torch.int8)
    change_tensors(folder, weight_zero_point=zero)
    LLM(str(folder), device=TEST_DEVICE, num_blocks=64)
    change_tensors(folder, weight_zero_point=zero + 1)
    assert "weight_zero_point' is not 0, but config.json says symmetric" in refusal(folder)


def test_scales_without_dimensions(tmp_path: Path) -> None:
    """The same model as AutoFP8 would have written it."""
    folder = Path(shutil.copytree(FILES / "ct-fp8-tensor", tmp_path / "model"))
    want = LLM(str(folder), device=TEST_DEVICE, num_blocks=64).logits([1, 2, 3])
    config = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = tensors[name].reshape(())
        tensors[name.replace("weight_scale", "input_scale")] = torch.tensor(0.1)
    save_file(tensors, path)
    llm = LLM(str(folder), device=TEST_DEVICE, num_blocks=64)
    assert torch.equal(llm.logits([1, 2, 3]), want)
    source = ParallelSource(open_checkpoint(folder), torch.device("cpu"), num_readers=1)
    mine = build_decoder(llm.spec, max_model_len=64, device="cpu", weight_format=CHECKPOINT)
    mine.load(source)
    unpacked = LLM(str(folder), weight_format="plain", device=TEST_DEVICE, num_blocks=64)
    torch.testing.assert_close(unpacked.logits([1, 2, 3]), want, atol=1e-3, rtol=1e-3)


def test_zeros_that_awq_says_are_none(tmp_path: Path) -> None:
    """gptqmodel writes the middle of the codes."""
    folder = Path(shutil.copytree(FILES / "awq-4", tmp_path / "model"))
    change_config(folder, zero_point=False)
    assert "qzeros' has zeros, but config.json says zero_point false" in refusal(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name].fill_(0x88888888 - (1 << 32))
    save_file(tensors, path)
    without = LLM(str(folder), device=TEST_DEVICE, num_blocks=64).logits([1, 2, 3])
    change_config(folder, zero_point=True)
    with_zeros = LLM(str(folder), device=TEST_DEVICE, num_blocks=64).logits([1, 2, 3])
    torch.testing.assert_close(without, with_zeros, atol=1e-3, rtol=1e-3)


def test_what_is_not_read_is_refused_with_the_way_out(model: Path) -> None:
    change_config(model, quant_method="aqlm")
    assert "read are compressed-tensors, gptq, awq, fp8" in refusal(model)


def test_stored_cannot_be_had_of_what_is_not(tmp_path: Path) -> None:
    from tests.tiny_model import make_tiny_model

    folder = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="weight_format checkpoint: no quantized matrices"):
        LLM(str(folder), weight_format="checkpoint", device=TEST_DEVICE, num_blocks=64)
    assert served(NAMES[0], load_format="random").resolved.weight_format == "plain"


# ------------------------------------------------------------------------ ranks


SPLIT = ("ct-int4-zeros", "ct-w8a8", "ct-fp8-channel", "ct-fp8-tensor", "gptq-4-zeros")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", SPLIT)
def test_a_rank_reads_its_share(name: str, rank: int) -> None:
    """The tensors of the checkpoint are cut, many at once, where the matrices would be."""
    folder = FILES / name
    spec, unpacked = source_of(folder)
    checkpoint = open_checkpoint(folder)
    options: dict[str, Any] = {"max_model_len": 64, "device": "cpu"}
    options["placement"] = Placement(rank, 2, Alone())
    source = ParallelSource(checkpoint, torch.device("cpu"), num_readers=2, chunk_bytes=300)
    mine = build_decoder(spec, weight_format=CHECKPOINT, **options)
    wanted = build_decoder(spec, **options)
    mine.load(source)
    wanted.load(unpacked)
    for own, other in zip(mine.layers, wanted.layers, strict=True):
        pairs = zip(
            [*own.attention.linears, *own.feed_forward.linears],
            [*other.attention.linears, *other.feed_forward.linears],
            strict=True,
        )
        for one, plain in pairs:
            got = one.format.dequantize(one.parameters).float()
            assert torch.equal(got, plain.format.dequantize(plain.parameters)), one.parts
