"""A model quantized layer by layer: what is written, reported, resumed and refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.architectures import read_spec
from ridgeline.compression.checkpoints import FileTensors, write_plain
from ridgeline.compression.layer import Layer, cut
from ridgeline.compression.rounding import METHODS, Method
from ridgeline.compression.stream import Job, Report, Texts, columns, quantize_model, stored_dtype
from ridgeline.errors import ConfigError
from ridgeline.layers.cut_source import of_parameters
from ridgeline.layers.decoder import embedding_scale
from ridgeline.quantization.algorithms.gptq import GptqSettings
from ridgeline.quantization.algorithms.grid import Grid
from ridgeline.quantization.integers import RowRounding
from ridgeline.quantization.writer import read_shard
from tests.layers.reference_models import VOCAB, ReferenceModel, tiny_config

CPU = torch.device("cpu")
LATENT = {"q_lora_rank": 32, "v_head_dim": 16, "kv_lora_rank": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "tied": tiny_config("llama", tie_word_embeddings=True),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3"),
    "window": tiny_config("mistral", sliding_window=5),
    "mixtral": tiny_config("mixtral"),
    "cohere": tiny_config("cohere", use_qk_norm=True, attention_bias=True),
    "falcon": tiny_config("falcon"),
    "latent": tiny_config("minicpm3", **LATENT),
    "latent straight": tiny_config("minicpm3", **LATENT | {"q_lora_rank": None}),
    "gpt2": tiny_config("gpt2"),
    "gpt_neox": tiny_config("gpt_neox"),
    "stablelm": tiny_config("stablelm", qk_layernorm=True, use_qkv_bias=True),
    "phi3": tiny_config("phi3"),
    "phi3 part": tiny_config("phi3", partial_rotary_factor=0.5),
    "starcoder2": tiny_config("starcoder2"),
    "gemma2": tiny_config("gemma2", tie_word_embeddings=True, sliding_window=5),
    "qwen2_moe": tiny_config("qwen2_moe", moe_intermediate_size=32),
    "qwen3_moe": tiny_config("qwen3_moe", moe_intermediate_size=32),
    "glm4_moe": tiny_config("glm4_moe", moe_intermediate_size=32, use_qk_norm=True),
    "deepseek": tiny_config("deepseek_v3", moe_intermediate_size=32, **LATENT),
    "granitemoe": tiny_config("granitemoe", intermediate_size=48),
    "granitemoeshared": tiny_config("granitemoeshared", intermediate_size=48),
    "gpt_oss": tiny_config("gpt_oss", num_hidden_layers=3, rope_scaling={"rope_type": "default"}),
}
EXPERTS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek", "granitemoe", "granitemoeshared",
    "gpt_oss",
)  # fmt: skip
_MODELS: dict[str, ReferenceModel] = {}


def reference(name: str) -> ReferenceModel:
    if name not in _MODELS:
        _MODELS[name] = ReferenceModel(CONFIGS[name])
    return _MODELS[name]


def written(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir()
    config = CONFIGS[name] | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    tensors = {n: t.to(dtype).contiguous() for n, t in reference(name).tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def texts(calibration: int = 12, held_out: int = 6, length: int = 24) -> Texts:
    noise = torch.Generator().manual_seed(5)
    calibration_NS = torch.randint(3, VOCAB, (calibration, length), generator=noise)
    held_out_NS = torch.randint(3, VOCAB, (held_out, length), generator=noise)
    scored_NS = torch.rand(held_out, length, generator=noise) < 0.7
    return Texts(calibration_NS, held_out_NS, scored_NS)


def method(name: str, model: Path, bits: int = 4, group: int = 16, **more: Any) -> Method:
    dtype = stored_dtype(model)
    return Method(name, Grid(bits, group, more.pop("symmetric", True), dtype), dtype, **more)


def quantized(model: Path, out: Path, name: str, **more: Any) -> Report:
    job = Job(model, out, method(name, model, **more), texts())
    return quantize_model(job)


def logits_of(name: str, folder: Path, ids_NS: torch.Tensor) -> torch.Tensor:
    """By Transformers, with the weights of a plain checkpoint, in float32."""
    model = ReferenceModel(CONFIGS[name]).model
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    found = stacked(found) if name in EXPERTS else found
    state = dict(model.state_dict())
    for key in state:
        source = "model.embed_tokens.weight" if key not in found else key
        state[key] = found[source].float()
    model.load_state_dict(state)
    with torch.no_grad():
        return torch.as_tensor(model(ids_NS).logits)


def stacked(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names that Transformers 5 keeps tensors under: experts are one, gate above up, or, in
    a gpt-oss, transposed and in turn."""
    is_granite = any(".router.layer." in key for key in found)
    is_gpt_oss = any(key.endswith(".sinks") for key in found)
    other = {
        "moe.input_linear.weight": "moe.experts.gate_up_proj",
        "moe.output_linear.weight": "moe.experts.down_proj",
        "router.layer.": "router.",
        **({} if is_granite else {"block_sparse_moe.": "mlp."}),
    }
    named = dict(found)
    for ours, theirs in other.items():
        named = {key.replace(ours, theirs): t for key, t in named.items()}
    expert = re.compile(r"(.*[.]experts)[.](\d+)[.](\w+?)(?:_proj)?[.](weight|bias)")
    lists: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    for key in list(named):
        if one := expert.fullmatch(key):
            role = {"w1": "gate", "w2": "down", "w3": "up"}.get(one[3], one[3])
            lists.setdefault((one[1], role, one[4]), {})[int(one[2])] = named.pop(key)
    for (stem, role, kind), by_expert in lists.items():
        every = torch.stack([by_expert[number] for number in sorted(by_expert)])
        if role == "up":
            continue
        if role == "gate":
            above = lists[stem, "up", kind]
            ups = torch.stack([above[number] for number in sorted(above)])
            every = torch.cat((every, ups), 1)
            if is_gpt_oss:
                every = torch.stack(every.chunk(2, 1), 2).flatten(1, 2)
        name = f"{stem}.{'gate_up' if role == 'gate' else role}_proj"
        every = every.transpose(1, 2) if is_gpt_oss and kind == "weight" else every
        named[name if kind == "weight" else f"{name}_bias"] = every
    return named


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layers_compute_what_transformers_does(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", name)
    spec_ids = texts().held_out_NS
    spec = read_spec(CONFIGS[name])
    source = of_parameters(FileTensors(folder), spec)
    scale = embedding_scale(spec, torch.float32)
    states = source.tensor(spec.tensor_names["embedding"])[spec_ids] * scale
    if spec.learned_positions:
        states = states + source.tensor(spec.tensor_names["positions"])[: spec_ids.shape[1]]
    with torch.no_grad():
        wanted = reference(name).model(spec_ids, output_hidden_states=True).hidden_states
    for index in range(spec.num_layers - 1):
        states = Layer(source, spec, index, max_tokens=spec_ids.shape[1], device=CPU)(states)
        whole = states * spec.residual_scale
        assert torch.allclose(whole, wanted[index + 1], rtol=1e-4, atol=1e-4), index


@pytest.mark.every_pair
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("name", [one for one in CONFIGS if one not in ("window", "stablelm")])
def test_the_report_is_what_transformers_makes_of_the_dequantized_weights(
    name: str, how: str, symmetric: bool, tmp_path: Path
) -> None:
    model = written(tmp_path / "model", name)
    found = quantized(model, tmp_path / "out", how, symmetric=symmetric).quality
    write_plain(tmp_path / "out", tmp_path / "plain")
    given = texts()
    ids_NS, scored_NS = given.held_out_NS, given.is_scored_NS[:, 1:]
    p = torch.log_softmax(logits_of(name, model, ids_NS)[:, :-1], -1)[scored_NS]
    q = torch.log_softmax(logits_of(name, tmp_path / "plain", ids_NS)[:, :-1], -1)[scored_NS]
    said = ids_NS[:, 1:][scored_NS]
    assert found.num_tokens == len(said)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3, abs=1e-6)
    loss = -q.gather(1, said[:, None]).mean()
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-3)
    loss = -p.gather(1, said[:, None]).mean()
    assert found.original_perplexity == pytest.approx(float(loss.exp()), rel=1e-3)
    same = (p.argmax(-1) == q.argmax(-1)).float().mean()
    assert found.same_top == pytest.approx(float(same), abs=1e-2)
    assert found.kl > 1e-5


@pytest.mark.parametrize("name", ["llama", "window", "mixtral", "gpt_neox", "phi3", "latent"])
def test_scales_folded_by_awq_change_nothing_by_themselves(name: str, tmp_path: Path) -> None:
    """At 8 bits what is left is rounding (which lets some tokens change their experts); a scale
    folded in wrongly would be far more."""
    model = written(tmp_path / "model", name)
    rounded = quantized(model, tmp_path / "rtn", "rtn", bits=8).quality.kl
    assert rounded < 0.05
    assert quantized(model, tmp_path / "awq", "awq", bits=8).quality.kl < 2 * rounded
    folded = load_file(tmp_path / "awq" / "model-00001-of-00004.safetensors")
    norm = read_spec(CONFIGS[name]).tensor_names["input_norm"].format(layer=0)
    assert not torch.equal(folded[norm], FileTensors(model).tensor(norm))


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_checkpoints_stay_so(dtype: torch.dtype, how: str, tmp_path: Path) -> None:
    model = written(tmp_path / "model", "llama", dtype)
    report = quantized(model, tmp_path / "out", how)
    first, note = read_shard(tmp_path / "out" / "model-00001-of-00004.safetensors")
    assert note == {"layer": 0, "few": {}}
    assert {t.dtype for t in first.values()} == {dtype, torch.int32, torch.int64}
    assert report.num_bytes < report.original_bytes
    total = sum(t.numel() * t.element_size() for t in all_tensors(tmp_path / "out").values())
    assert total == report.num_bytes


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    assert set(found) == set(index["weight_map"])
    return found


class Stopped(Exception):
    pass


@pytest.mark.parametrize("how", METHODS)
def test_an_interrupted_run_goes_on_and_ends_the_same(how: str, tmp_path: Path) -> None:
    model = written(tmp_path / "model", "llama", torch.bfloat16)
    whole = quantized(model, tmp_path / "whole", how)
    job = Job(model, tmp_path / "out", method(how, model), texts())

    def stop(done: int, of: int) -> None:
        if done == 2:
            raise Stopped

    with pytest.raises(Stopped):
        quantize_model(job, stop)
    left = {path.name for path in job.out.iterdir()}
    assert "model.safetensors.index.json" not in left
    assert "config.json" not in left
    report = quantize_model(job)
    assert [one.resumed for one in report.layers] == [True, True, False]
    assert report.quality == whole.quality
    for name, tensor in all_tensors(tmp_path / "whole").items():
        assert torch.equal(all_tensors(job.out)[name], tensor), name


def test_going_on_with_other_settings_is_refused(tmp_path: Path) -> None:
    model = written(tmp_path / "model", "llama")
    job = Job(model, tmp_path / "out", method("rtn", model), texts())

    def stop(done: int, of: int) -> None:
        if done == 1:
            raise Stopped

    with pytest.raises(Stopped):
        quantize_model(job, stop)
    with pytest.raises(ConfigError, match="interrupted run with other settings"):
        quantize_model(replace(job, method=method("rtn", model, bits=3)))
    with pytest.raises(ConfigError, match="interrupted run with other settings"):
        quantize_model(replace(job, texts=texts(length=23)))


def test_states_in_files_give_the_same(tmp_path: Path) -> None:
    model = written(tmp_path / "model", "llama")
    job = Job(model, tmp_path / "a", method("gptq", model), texts())
    in_memory = quantize_model(job)
    in_files = quantize_model(replace(job, out=tmp_path / "b", spill_bytes=0))
    assert in_memory.quality == in_files.quality
    assert not (tmp_path / "b" / ".states").exists()


def test_each_layer_alone(tmp_path: Path) -> None:
    model = written(tmp_path / "model", "llama")
    job = Job(model, tmp_path / "out", method("rtn", model, bits=3), texts(), alone=True)
    report = quantize_model(job)
    alone = [one.alone.kl for one in report.layers if one.alone is not None]
    assert len(alone) == 3
    assert min(alone) > 0
    assert max(alone) < report.quality.kl
    assert report.layers[0].drift > 0
    again = quantize_model(replace(job, out=tmp_path / "again", alone=False))
    assert again.quality == report.quality


def test_what_cannot_be_done_is_said_before_anything_is_written(tmp_path: Path) -> None:
    model = written(tmp_path / "model", "llama")
    out = tmp_path / "out"
    with pytest.raises(
        ConfigError, match=r"64 does not divide the 80 .*down_proj.weight; .*: 16, or 0"
    ):
        quantized(model, out, "rtn", group=64)
    with pytest.raises(ConfigError, match="is the model itself"):
        quantized(model, model, "rtn")
    with pytest.raises(ConfigError, match="unknown method 'best'; choose one of rtn, gptq, awq"):
        method("best", model)
    assert not out.exists()
    out.mkdir()
    (out / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        quantized(model, out, "rtn")
    shutil.rmtree(out)
    quantized(model, out, "rtn")
    with pytest.raises(ConfigError, match="quantization_config"):
        quantized(out, tmp_path / "twice", "rtn")
    with pytest.raises(ConfigError, match="plain already"):
        write_plain(model, tmp_path / "plain")


@pytest.mark.parametrize("how", ["gptq", "awq"])
def test_experts_that_few_tokens_came_to_are_rounded_to_nearest(how: str, tmp_path: Path) -> None:
    """And are named, with how many; also when the run was interrupted behind them."""
    model, few_texts = written(tmp_path / "model", "qwen3_moe"), texts(calibration=3)
    few_texts.calibration_NS[:] = few_texts.calibration_NS[0, 0]  # to the same experts each time
    job = Job(model, tmp_path / "out", method(how, model), few_texts)

    def stop(done: int, of: int) -> None:
        if done == 2:
            raise Stopped

    with pytest.raises(Stopped):
        quantize_model(job, stop)
    report = quantize_model(job)
    whole = quantize_model(replace(job, out=tmp_path / "whole"))
    assert [one.few for one in report.layers] == [one.few for one in whole.layers]
    quantized(model, tmp_path / "rtn", "rtn")
    few = report.layers[0].few
    assert set(few.values()) == {0}
    assert 0 < len(few) < 24
    assert all(".mlp.experts." in name for name in few)
    got, nearest = all_tensors(tmp_path / "out"), all_tensors(tmp_path / "rtn")
    matrices = [name for name in columns(read_spec(CONFIGS["qwen3_moe"])) if ".layers.0." in name]
    codes = {name: name.removesuffix("weight") + "weight_packed" for name in matrices}
    same = {name for name, key in codes.items() if torch.equal(got[key], nearest[key])}
    assert same == set(few)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek", "granitemoe", "gpt_oss"])
def test_rows_of_8_bits_are_those_of_int8_weights(name: str, tmp_path: Path) -> None:
    """Experts that were one tensor, too: what is written is what rounding at load makes of it."""
    model = written(tmp_path / "model", name)
    quantized(model, tmp_path / "out", "rtn", bits=8, group=0)
    write_plain(tmp_path / "out", tmp_path / "plain")
    spec = read_spec(CONFIGS[name])
    source, got = of_parameters(FileTensors(model), spec), FileTensors(tmp_path / "plain")
    for matrix in columns(spec):
        want = RowRounding(8, 0, torch.float32).round_rows(source.tensor(matrix)).dequantize()
        assert torch.equal(got.tensor(matrix), want), matrix


def test_windows() -> None:
    ids = list(range(10, 33))
    assert cut(ids, length=10, first=None, most=9).tolist() == [ids[:10], ids[10:20]]
    assert cut(ids, length=10, first=1, most=9).tolist() == [[1, *ids[:9]], [1, *ids[9:18]]]
    assert cut(ids, length=10, first=None, most=1).tolist() == [ids[:10]]
    assert cut(ids, length=24, first=None, most=1).shape == (0, 24)


def story_windows(model: Path, shared: Path, length: int) -> Texts:
    from ridgeline.evaluation.texts import read_text
    from ridgeline.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    text = read_text(shared / "data" / "tinystories-sample" / "tinystories_sample.txt.gz")
    halves = text[:60_000], text[-30_000:]
    ids = [tokenizer.encode(half, add_special_tokens=False) for half in halves]
    first = tokenizer.bos_token_id
    calibration_NS = cut(ids[0], length=length, first=first, most=48)
    held_out_NS = cut(ids[1], length=length, first=first, most=16)
    return Texts(calibration_NS, held_out_NS, torch.ones_like(held_out_NS, dtype=torch.bool))


@pytest.mark.every_value
@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("stories260K", 0),
        ("babyllama-char105", 32),
        pytest.param("babyllama-char105-moe4", 8, marks=pytest.mark.slow),
    ],
)
def test_gptq_and_awq_beat_rounding_on_real_models(
    shared: Path, name: str, group: int, bits: int, tmp_path: Path
) -> None:
    model = shared / "models" / name
    given = story_windows(model, shared, 128)
    found = {
        how: quantize_model(
            Job(model, tmp_path / how, method(how, model, bits=bits, group=group), given)
        ).quality
        for how in METHODS
    }
    for how in ("gptq", "awq"):
        assert found[how].kl < 0.75 * found["rtn"].kl, (how, found)
        assert found[how].perplexity < found["rtn"].perplexity, (how, found)
        assert found[how].same_top > found["rtn"].same_top, (how, found)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 3])
def test_gptq_and_awq_beat_rounding_on_the_demo_model(bits: int, tmp_path: Path) -> None:
    from ridgeline import demo
    from ridgeline.evaluation.texts import bundled_tokens
    from ridgeline.text.chat import load_chat_template
    from ridgeline.text.tokenizer import load_tokenizer

    model = demo.folder("chat")
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    template = load_chat_template(model, tokenizer)
    shown = bundled_tokens(tokenizer, template, "train", 32 * 256)
    held = bundled_tokens(tokenizer, template, "test", 32 * 256)
    given = Texts(
        cut(shown.token_ids, length=256, first=None, most=32),
        cut(held.token_ids, length=256, first=None, most=32),
        cut(held.is_scored, length=256, first=None, most=32).bool(),
    )
    found = {
        how: quantize_model(
            Job(model, tmp_path / how, method(how, model, bits=bits, group=128), given)
        ).quality
        for how in METHODS
    }
    for how in ("gptq", "awq"):
        assert found[how].kl < 0.75 * found["rtn"].kl, (how, found)
        assert found[how].perplexity < found["rtn"].perplexity, (how, found)


LIMITED = """
import resource, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from ridgeline.compression.stream import *
from ridgeline.quantization.algorithms.grid import Grid
model, out, extra = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
used = int(next(l for l in open('/proc/self/status') if l.startswith('VmSize')).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))
ids = torch.arange(3, 67).view(2, 32)
method = Method('rtn', Grid(4, 32, True, torch.bfloat16), torch.bfloat16)
quantize_model(Job(model, out, method, Texts(ids, ids, torch.ones(2, 32, dtype=torch.bool))))
"""


@pytest.mark.slow
def test_a_checkpoint_larger_than_the_memory_is_quantized(tmp_path: Path) -> None:
    """The address space may grow by less than half of what the checkpoint has."""
    config = tiny_config("llama", hidden_size=1024, intermediate_size=2816, num_hidden_layers=24)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    from ridgeline.architectures import expected_tensors, read_spec

    weight_map, total = {}, 0
    for number, (name, shape) in enumerate(expected_tensors(read_spec(config)).items()):
        file = f"part-{number}.safetensors"
        save_file({name: torch.full(shape, 0.01, dtype=torch.bfloat16)}, model / file)
        weight_map[name] = file
        total += 2 * int(torch.tensor(shape).prod())
    index = {"metadata": {}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    limit = 200 << 20
    assert total > 2 * limit
    command = [sys.executable, "-c", LIMITED, str(model), str(tmp_path / "out"), str(limit)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_act_order_and_damping_reach_the_rounding(tmp_path: Path) -> None:
    model = written(tmp_path / "model", "llama")
    plain = GptqSettings(act_order=False)
    one = quantized(model, tmp_path / "one", "gptq")
    other = quantized(model, tmp_path / "other", "gptq", gptq=plain)
    assert one.quality != other.quality
    for out, said in (("one", "static"), ("other", None)):
        config = json.loads((tmp_path / out / "config.json").read_text())
        groups = config["quantization_config"]["config_groups"]
        assert groups["group_0"]["weights"]["actorder"] == said
