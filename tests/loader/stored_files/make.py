"""Makes the quantized checkpoints in this folder, and what they must be read as. Run it from the
root, in an environment that has the tools:

    python -m tests.loader.stored_files.make

The models are random and tiny. compressed-tensors makes the scales, writes and reads its layouts
(and reads fp8 blocks); gptqmodel writes and reads GPTQ and AWQ, bitsandbytes its own two.
`expected.json` has the digests of the numbers that the tool reads, in the dtype that it reads them
in, and `expected.safetensors` the last logits of Transformers in float32 for these numbers, with
the tokens that follow greedily.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

HERE = Path(__file__).parent
SEED, WEIGHT_STD = 31, 0.2
NUM_LOGITS, NUM_TOKENS = 4, 16
VOCAB = 97
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """What stands for a matrix in the file, and the numbers that the tool reads."""

    tensors: Tensors
    numbers: torch.Tensor


Write = Callable[[str, torch.Tensor], Written | None]  # of a module; None: it stays as it is


def config_of(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes


def make_model(
    name: str, dtype: torch.dtype, section: dict[str, Any], write: Write, **changes: Any
) -> tuple[dict[str, Any], torch.Tensor]:
    """Writes the folder `name`; what `expected.json` says of it, and the logits."""
    torch.manual_seed(SEED)
    sizes = config_of(**changes)
    config = LlamaConfig(**sizes)
    made: Any = AutoModelForCausalLM
    model = made.from_config(config, dtype=torch.float32).eval()
    tensors: Tensors = {}
    digests: dict[str, str] = {}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, WEIGHT_STD)
            parameter.copy_(parameter.to(dtype))
            module = key.removesuffix(".weight")
            written = write(module, parameter.to(dtype)) if parameter.dim() == 2 else None
            if written is None:
                tensors[key] = parameter.to(dtype).contiguous()
                continue
            tensors |= {f"{module}.{k}": t.contiguous() for k, t in written.tensors.items()}
            if written.numbers.dtype != dtype:
                raise SystemExit(f"{name}: {key} is read as {written.numbers.dtype}, not {dtype}")
            digests[key] = digest(written.numbers)
            parameter.copy_(written.numbers.float())
        prompt = [1, *torch.randint(5, VOCAB, (11,)).tolist()]
        logits = model(torch.tensor([prompt])).logits[0, -NUM_LOGITS:]
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "quantization_config": section,
    }
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = {
        "prompt": prompt,
        "greedy": ids[len(prompt) :],
        "dtype": str(dtype).removeprefix("torch."),
        "atol": 1e-4 if dtype == torch.float32 else 0.1,
        "sha256": digests,
    }
    return told, logits.contiguous()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


# ------------------------------------------------------------------------ compressed-tensors


def compressed(
    form: str, dtype: torch.dtype, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Write]:
    """The section of config.json, and who writes a matrix: both by the package."""
    quantization = import_module("compressed_tensors.quantization")
    helpers = import_module("compressed_tensors.quantization.utils")
    base = import_module("compressed_tensors.compressors").BaseCompressor
    args = quantization.QuantizationArgs(**weights)
    rounded = None if inputs is None else quantization.QuantizationArgs(**inputs)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=rounded, format=form
    )
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme},
        quantization_status="compressed",
        format=form,
        ignore=["lm_head"],
    )
    compressor = base.get_value_from_registry(form)

    def write(module: str, weight: torch.Tensor) -> Written | None:
        if "layers" not in module:
            return None
        low, high = extremes(weight, args)
        scale, zero = helpers.calculate_qparams(low, high, args)
        state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
        if args.symmetric:
            del state["weight_zero_point"]
        stored = compressor.compress(state, scheme)
        numbers = compressor.decompress(dict(stored), scheme)["weight"]
        return Written(stored, numbers)

    section = json.loads(config.model_dump_json())
    return section, write


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest weight of each group, row or block, or of all, as scales are shaped."""
    strategy = str(getattr(args.strategy, "value", args.strategy))
    rows, columns = weight.shape
    if strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if strategy == "block":
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = in_blocks(padded, high, wide)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    size = args.group_size if strategy == "group" else columns
    groups = weight.reshape(rows, -1, size)
    return groups.amin(-1), groups.amax(-1)


def in_blocks(padded: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[blocks down, rows, blocks across, columns]"""
    return padded.reshape(len(padded) // rows, rows, -1, columns)


# ------------------------------------------------------------------------ fine-grained fp8


def fine_grained() -> tuple[dict[str, Any], Write]:
    """Blocks as DeepSeek publishes them, float32 scales; read by compressed-tensors' converter."""
    converters = import_module("compressed_tensors.entrypoints.convert.converters")
    section = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }

    def write(module: str, weight: torch.Tensor) -> Written | None:
        if "layers" not in module:
            return None
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
        blocks = in_blocks(padded, 128, 128)
        scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        stored = {
            "weight": codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(),
            "weight_scale_inv": scale,
        }
        reader = converters.FP8BlockDequantizer(targets=["re:.*"], dtype=torch.bfloat16)
        named = {f"{module}.{k}": t for k, t in stored.items()}
        return Written(stored, reader.process(dict(named))[f"{module}.weight"])

    return section, write


# ------------------------------------------------------------------------ GPTQ and AWQ


def grid(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Any, Any]:
    """Scales and zeros [O, G] of a grid over each group, as GPTQ's quantizer makes it."""
    top = (1 << bits) - 1
    groups = weight.float().reshape(len(weight), -1, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / top).half().float()
    zero = torch.full_like(scale, (top + 1) // 2) if symmetric else (-low / scale).round()
    return scale, zero.clamp(1, top)  # version 1 of the layout has no 0


def gptq(
    bits: int, group: int, *, version: int, symmetric: bool, act_order: bool
) -> tuple[dict[str, Any], Write]:
    section = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "pack_dtype": "int32",
    }

    def write(module: str, weight: torch.Tensor) -> Written | None:
        if "layers" not in module:
            return None
        columns = weight.shape[1]
        noise = torch.Generator().manual_seed(len(module))
        groups = torch.arange(columns) // group
        order = torch.randperm(columns, generator=noise) if act_order else torch.arange(columns)
        g_idx = torch.empty_like(groups)
        g_idx[order] = groups
        scale, zero = grid(weight[:, order], bits, group, symmetric=symmetric)
        near = nearest(weight, scale[:, g_idx], zero[:, g_idx], bits)
        layer = quant_layer("torch", "TorchLinear", weight, bits, group)
        layer.pack_original(near, scale, zero, g_idx.to(torch.int32))
        tools = import_module("gptqmodel.utils.model")
        if version == 1:
            own = SimpleNamespace(bits=bits, pack_dtype=torch.int32)
            tools.convert_gptq_v2_to_v1_format_module(layer, own)
        names = ("qweight", "qzeros", "scales", "g_idx")
        stored = {name: getattr(layer, name).clone() for name in names}
        if version == 1:
            tools.convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        return Written(stored, layer.dequantize_weight().T.contiguous())

    return section, write


def nearest(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> Any:
    """A layer whose weights are on the grid, so that no packer meets a code that is none."""
    codes = (weight.float() / scale + zero).round().clamp(0, (1 << bits) - 1)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = (codes - zero) * scale
    return layer


def quant_layer(module: str, name: str, weight: torch.Tensor, bits: int, group: int) -> Any:
    """One of gptqmodel's, empty."""
    made = getattr(import_module(f"gptqmodel.nn_modules.qlinear.{module}"), name)
    rows, columns = weight.shape
    sizes = {"bits": bits, "group_size": group, "in_features": columns, "out_features": rows}
    return made(**sizes, sym=False, desc_act=True, register_buffers=True)


def awq(group: int) -> tuple[dict[str, Any], Write]:
    section = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }

    def write(module: str, weight: torch.Tensor) -> Written | None:
        if "layers" not in module:
            return None
        scale, zero = grid(weight, 4, group, symmetric=False)
        scale_OI, zero_OI = (one.repeat_interleave(group, 1) for one in (scale, zero))
        layer = quant_layer("torch_awq", "AwqTorchLinear", weight, 4, group)
        layer.pack(nearest(weight, scale_OI, zero_OI, 4), scale.half().float(), zero)
        stored = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales")}
        numbers = layer._dequantize_weight_for_inference(weight, dtype=torch.float16)
        return Written(stored, numbers.T.contiguous())

    return section, write


# ------------------------------------------------------------------------ bitsandbytes


def bitsandbytes(**options: Any) -> tuple[dict[str, Any], Write]:
    """`options` are those of Transformers' BitsAndBytesConfig."""
    functional = import_module("bitsandbytes").functional
    config = import_module("transformers").BitsAndBytesConfig(**options)

    def write(module: str, weight: torch.Tensor) -> Written | None:
        if "layers" not in module:
            return None
        if options.get("load_in_8bit"):
            codes, factors, _ = functional.int8_vectorwise_quant(weight.half())
            kind = torch.zeros((), dtype=torch.uint8)
            stored = {"weight": codes, "SCB": factors, "weight_format": kind}
            return Written(stored, functional.int8_vectorwise_dequant(codes, factors))
        codes, state = functional.quantize_4bit(
            weight,
            blocksize=64,
            quant_type=options["bnb_4bit_quant_type"],
            compress_statistics=options["bnb_4bit_use_double_quant"],
        )
        beside = {f"weight.{k}": t for k, t in state.as_dict(packed=True).items()}
        return Written({"weight": codes, **beside}, functional.dequantize_4bit(codes, state))

    return config.to_dict(), write


# ------------------------------------------------------------------------ all of them

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
BY_TOKEN = {"dynamic": True, "strategy": "token", "symmetric": True, "num_bits": 8}
WIDE = {"intermediate_size": 128}
LARGE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def integers(bits: int, group: int, *, symmetric: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    return found | (
        {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    )


def models() -> dict[str, tuple[torch.dtype, tuple[dict[str, Any], Write], dict[str, Any]]]:
    packed, plain, floats = "pack-quantized", "int-quantized", "float-quantized"
    tokens = BY_TOKEN | {"type": "float"}
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    blocks = E4M3 | {"strategy": "block", "block_structure": [128, 128]}
    return {
        "ct-int4-group": (BRAIN, compressed(packed, BRAIN, integers(4, 32)), {}),
        "ct-int4-zeros": (HALF, compressed(packed, HALF, integers(4, 16, symmetric=False)), {}),
        "ct-int3-channel": (SINGLE, compressed(packed, SINGLE, integers(3, 0)), {}),
        "ct-int8-group": (SINGLE, compressed(packed, SINGLE, integers(8, 32)), {}),
        "ct-w8a8": (BRAIN, compressed(plain, BRAIN, integers(8, 0), BY_TOKEN), {}),
        "ct-fp8-channel": (
            BRAIN, compressed(floats, BRAIN, E4M3 | {"strategy": "channel"}, tokens), {},
        ),
        "ct-fp8-tensor": (
            SINGLE, compressed(floats, SINGLE, E4M3 | {"strategy": "tensor"}, tokens), {},
        ),
        "ct-fp8-blocks": (BRAIN, compressed(floats, BRAIN, blocks, tokens), LARGE),
        "fp8-blocks": (BRAIN, fine_grained(), LARGE),
        "gptq-4-order": (HALF, gptq(4, 32, version=1, symmetric=True, act_order=True), {}),
        "gptq-4-zeros": (HALF, gptq(4, 16, version=1, symmetric=False, act_order=False), {}),
        "gptq-8": (HALF, gptq(8, 32, version=2, symmetric=False, act_order=True), {}),
        "gptq-3": (HALF, gptq(3, 32, version=1, symmetric=False, act_order=False), {}),
        "gptq-2": (HALF, gptq(2, 32, version=2, symmetric=True, act_order=False), {}),
        "awq-4": (HALF, awq(32), {}),
        "bnb-nf4": (SINGLE, bitsandbytes(**four, bnb_4bit_use_double_quant=True), WIDE),
        "bnb-int8": (SINGLE, bitsandbytes(load_in_8bit=True), {}),
    }  # fmt: skip


def main() -> None:
    told, logits = {}, {}
    for name, (dtype, (section, write), changes) in models().items():
        told[name], logits[name] = make_model(name, dtype, section, write, **changes)
    (HERE / "expected.json").write_text(json.dumps(told, indent=1) + "\n")
    save_file(logits, HERE / "expected.safetensors")


if __name__ == "__main__":
    main()
