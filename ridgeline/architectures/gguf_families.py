"""What does a GGUF file of another architecture than Llama's say in other ways?

Names, keys and the order of rows are those that llama.cpp's converter writes: rows of q and k as a
safetensors checkpoint has them, q, k and v one below the other where they are one tensor, and no
matrix transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ridgeline.architectures.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from ridgeline.architectures.gguf_experts import (
    COUNT,
    NEXTN,
    deepseek,
    glm4_moe,
    has_experts,
    softmax_experts,
)
from ridgeline.architectures.spec import ModelSpec

Shapes = Mapping[str, tuple[int, ...]]
_BLOCK = "blk.{layer}."
QKV = (f"{_BLOCK}attn_qkv", ("q", "k", "v"))
Q_NORM = "blk.0.attn_q_norm.weight"
TWO_NORMS = "blk.0.attn_norm_2.weight"  # of the larger Falcons


@dataclass(frozen=True, slots=True)
class Dialect:
    """`family` is its model_type. `eps`: the key of config.json for that of its layer norms, "": it
    has RMS norms. `together`: which roles are one tensor, without the kind at its end. `meant`:
    keys that other architectures must not have. `names`: of roles that have others than in most.
    `yarn`: what its scaled positions have beside the keys."""

    family: str
    eps: str = ""
    together: tuple[tuple[str, tuple[str, ...]], ...] = ()
    meant: tuple[str, ...] = ()
    rotates_part: bool = False
    is_latent: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    yarn: Mapping[str, object] = field(default_factory=dict)


PARALLEL, WINDOW, SCALE = "use_parallel_residual", "attention.sliding_window", "logit_scale"
SCALES = ("embedding_scale", "residual_scale")
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# Named by the norm of a Llama that stands there.
BEHIND = {"pre_feed_forward_norm": f"{_BLOCK}post_attention_norm.weight"}
DIALECTS: Mapping[str, Dialect] = {
    "arcee": Dialect("arcee"),
    "cohere2": Dialect("cohere2", "layer_norm_eps", meant=(SCALE, WINDOW)),
    "command-r": Dialect("cohere", "layer_norm_eps", meant=(SCALE,)),
    "deepseek2": Dialect("deepseek_v3", meant=(COUNT, NEXTN, LOG_MULTIPLIER), is_latent=True),
    "exaone4": Dialect("exaone4", meant=(WINDOW,)),
    "falcon": Dialect("falcon", "layer_norm_epsilon", (QKV,)),
    "gemma": Dialect("gemma"),
    "gemma2": Dialect("gemma2", meant=(WINDOW,)),
    "gemma3": Dialect("gemma3_text", meant=(WINDOW,)),
    "glm4": Dialect("glm4", together=((f"{_BLOCK}ffn_up", ("gate", "up")),), rotates_part=True),
    "glm4moe": Dialect("glm4_moe", meant=(COUNT, NEXTN), rotates_part=True, names=BEHIND),
    "gpt-oss": Dialect("gpt_oss", meant=(COUNT, WINDOW), names=BEHIND, yarn={"truncate": False}),
    "gpt2": Dialect("gpt2", "layer_norm_epsilon", (QKV,)),
    "gptneox": Dialect("gpt_neox", "layer_norm_eps", (QKV,), (PARALLEL,), rotates_part=True),
    "granite": Dialect("granite", meant=("attention.scale", *SCALES, SCALE)),
    "granitemoe": Dialect("granitemoe", meant=("attention.scale", *SCALES, SCALE, COUNT)),
    "hunyuan-dense": Dialect("hunyuan_v1_dense"),
    "llama": Dialect("llama", meant=(COUNT,)),
    "minicpm3": Dialect("minicpm3", is_latent=True),
    "olmo2": Dialect("olmo2", meant=(WINDOW,)),
    "phi3": Dialect(
        "phi3",
        together=(QKV, (f"{_BLOCK}ffn_up", ("gate", "up"))),
        meant=(WINDOW,),
        rotates_part=True,
    ),
    "qwen2moe": Dialect("qwen2_moe", meant=(COUNT,)),
    "qwen3moe": Dialect("qwen3_moe", meant=(COUNT,)),
    "seed_oss": Dialect("seed_oss", names=BEHIND),
    "smollm3": Dialect("smollm3"),
    "stablelm": Dialect("stablelm", "layer_norm_eps", meant=(PARALLEL,), rotates_part=True),
    "starcoder2": Dialect("starcoder2", "norm_epsilon"),
}
LLAMA = Dialect("")
GELU = "gelu_pytorch_tanh"
LARGEST_EXAONE = 64, 4096  # layers, tokens of a window
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of those with 27 billion parameters


def dialect_of(name: str) -> Dialect:
    return DIALECTS.get(name, LLAMA)


def own_config(name: str, reader: ConfigReader, shapes: Shapes) -> dict[str, object]:
    """What config.json would say beside the keys of a Llama."""
    has_biases = "blk.0.attn_qkv.bias" in shapes or "blk.0.attn_q.bias" in shapes
    if name in ("cohere2", "command-r"):
        scale = reader.number(SCALE, default=None, low=1e-6, high=1e6)
        found: dict[str, object] = {SCALE: scale}
        if name == "cohere2":
            window = reader.integer(WINDOW, high=MAX_POSITIONS)
            return found | {"sliding_window": window, "attention_bias": has_biases}
        return found | {"use_qk_norm": Q_NORM in shapes, "attention_bias": has_biases}
    if name.startswith("gemma"):
        return _gemma(name, reader)
    if name == "arcee":
        return {"hidden_act": "relu2", "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    if name == "seed_oss":
        return {"attention_out_bias": "blk.0.attn_output.bias" in shapes}
    if name == "olmo2" and reader.integer(WINDOW, low=0, high=MAX_POSITIONS, default=0):
        return {"model_type": "olmo3", **_windows(reader)}
    if name == "exaone4":
        return _windows(reader)
    if name == "minicpm3":
        return _minicpm3(reader, shapes)
    if name == "deepseek2":
        return deepseek(reader, shapes)
    if name == "glm4moe":
        return glm4_moe(reader, shapes)
    multipliers = _multipliers(reader) if name.startswith("granite") else {}
    if has_experts(reader):
        return multipliers | softmax_experts(name, reader, shapes, has_biases=has_biases)
    if name == "granite":
        return multipliers
    if name == "falcon":
        return _falcon(reader, shapes, has_biases)
    if name == "gpt2":
        return {"hidden_act": "gelu_new"}
    if name == "gptneox":
        parallel = reader.flag(PARALLEL, default=True)
        return {PARALLEL: parallel, "attention_bias": has_biases, "hidden_act": "gelu"}
    if name == "stablelm":
        # As llama.cpp decides it: a file without the second norm has no use for it.
        return {
            PARALLEL: "blk.0.ffn_norm.weight" not in shapes,
            "use_qkv_bias": has_biases,
            "qk_layernorm": Q_NORM in shapes,
        }
    if name == "starcoder2":
        return {"use_bias": has_biases, "hidden_act": "gelu_pytorch_tanh"}
    if name == "phi3" and reader.has(WINDOW):
        window = reader.integer(WINDOW, low=0, high=MAX_POSITIONS)
        return {"sliding_window": window or None}
    return {}


def _windows(reader: ConfigReader) -> dict[str, object]:
    """Files say which layers look back on a window since there are any; earlier ones are of models
    in which each fourth layer sees everything. Of the first EXAONE 4 llama.cpp knows by the number
    of layers that it has windows."""
    layers = reader.integer("block_count", high=MAX_LAYERS)
    default = LARGEST_EXAONE[1] if layers == LARGEST_EXAONE[0] else 0
    window = reader.integer(WINDOW, low=0, high=MAX_POSITIONS, default=default)
    looks_back = reader.flags(f"{WINDOW}_pattern", length=layers)
    if looks_back is None:
        looks_back = tuple(bool(window) and index % 4 > 0 for index in range(1, layers + 1))
    kinds = [("full_attention", "sliding_attention")[one] for one in looks_back]
    return {"sliding_window": window or None, "layer_types": kinds}


def _minicpm3(reader: ConfigReader, shapes: Shapes) -> dict[str, object]:
    """Its multipliers are not in the file: llama.cpp knows those of the one model that there is,
    which config.json has as defaults, too."""
    heads, head = reader.integer("attention.head_count"), reader.integer("attention.key_length")
    rotated = reader.integer("rope.dimension_count", high=head - 1)
    rows = shapes.get("blk.0.attn_kv_b.weight", (0,))[0]
    return {
        "kv_lora_rank": reader.integer("attention.kv_lora_rank"),
        "q_lora_rank": reader.integer("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": rows // heads - head + rotated,
    }


def _multipliers(reader: ConfigReader) -> dict[str, object]:
    keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": SCALES[0],
        "residual_multiplier": SCALES[1],
        "logits_scaling": SCALE,
    }
    return {key: reader.number(own, default=1.0, low=1e-6, high=1e6) for key, own in keys.items()}


def _falcon(reader: ConfigReader, shapes: Shapes, has_biases: bool) -> dict[str, object]:
    heads = reader.integer("attention.head_count")
    kv_heads = reader.integer("attention.head_count_kv", default=heads)
    return {
        "new_decoder_architecture": kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if TWO_NORMS in shapes else 1,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": reader.integer("feed_forward_length"),
        "bias": has_biases,
    }


def _gemma(name: str, reader: ConfigReader) -> dict[str, object]:
    """Files say neither which layers have a window nor what scores are multiplied by: llama.cpp
    knows, by the number of layers."""
    found: dict[str, object] = {"hidden_act": GELU, "hidden_activation": GELU}
    if name == "gemma":
        return found
    hidden, heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    size = reader.integer("attention.key_length", high=4096, default=max(1, hidden // heads))
    is_largest = reader.integer("block_count") == LARGEST_GEMMA[name]
    usual = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    for key, default in usual.items():
        default = default if name == "gemma2" else 0.0
        found[key] = reader.number(key, default=default, low=0.0, high=1e6) or None
    reader.refuse("attention.sliding_window_pattern", 6 if name == "gemma3" else 2)
    return found | {
        "query_pre_attn_scalar": max(1, hidden // heads) if is_largest else size,
        "sliding_window": reader.integer(WINDOW, high=MAX_POSITIONS),
        "rope_local_base_freq": reader.number(
            "rope.freq_base_swa", default=10_000.0, low=1.0, high=1e15
        ),
    }


def names_of(spec: ModelSpec) -> Mapping[str, str]:
    """Names in the file of roles that have others than in most."""
    if spec.family != "falcon" or spec.layers[0].parallel_norms != 2:
        return next((one.names for one in DIALECTS.values() if one.family == spec.family), {})
    return {
        f"{role}{suffix}": f"{_BLOCK}{norm}.{kind}"
        for role, norm in (("input_norm", "attn_norm_2"), ("pre_feed_forward_norm", "attn_norm"))
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    }
