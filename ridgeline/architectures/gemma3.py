"""What is a Gemma 3? Five layers that look back on a window for each that sees everything, norms
before and after each part, and a tied embedding. Described, not served yet.

The multimodal models have the language model in `text_config`; their image part is not described.
Source: the published config.json and Hugging Face Transformers `configuration_gemma3`.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_POSITIONS, ConfigReader
from ridgeline.architectures.family import (
    ACTIVATIONS,
    LAYER_TYPES,
    Defaults,
    model_spec,
    read_trunk,
)
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.rope_config import read_rope
from ridgeline.architectures.spec import DenseSpec, ModelSpec, RopeSpec

DEFAULTS = Defaults(
    rope_theta=1_000_000.0, norm_eps=1e-6, max_positions=131_072, num_kv_heads=4, head_dim=256
)
LOCAL_THETA = 10_000.0
UNSERVED = "norms that add one to their weight and embeddings that are scaled"
_STEM = "model.layers.{layer}."
NAMES = {
    **LLAMA_NAMES,
    "pre_feed_forward_norm": f"{_STEM}pre_feedforward_layernorm.weight",
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    """A text-only config."""
    return _read(config, max_model_len, NAMES)


def read_multimodal(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    """The language model of a config with `text_config`."""
    text = config.section("text_config")
    if text is None:
        raise config.fail("text_config", "is missing (an object)")
    outer = ("torch_dtype", "dtype", "bos_token_id", "eos_token_id")
    values = {key: config.values[key] for key in outer if config.has(key)}
    names = {role: f"language_model.{name}" for role, name in NAMES.items()}
    return _read(ConfigReader({**values, **text.values}, text.path), max_model_len, names)


def _read(config: ConfigReader, max_model_len: int | None, names: dict[str, str]) -> ModelSpec:
    filled = ConfigReader(
        {"vocab_size": 262_208, "tie_word_embeddings": True, **config.values}, config.path
    )
    everywhere, local = _ropes(filled)
    plain = {k: v for k, v in filled.values.items() if k not in ("rope_scaling", "rope_parameters")}
    trunk = read_trunk(ConfigReader(plain, config.path), DEFAULTS, None)
    full = replace(trunk, rope=everywhere).attention(qk_norm=True)
    window = filled.integer("sliding_window", high=MAX_POSITIONS, default=4096)
    sliding = replace(trunk, rope=local).attention(window=window, qk_norm=True)
    spec = model_spec(
        filled,
        trunk,
        family="gemma3",
        attention=tuple(
            sliding if kind == "sliding_attention" else full
            for kind in _layer_types(filled, trunk.num_layers)
        ),
        feed_forward=_dense(filled),
        tensor_names=names,
        norms="around",
    )
    return replace(spec, unserved=UNSERVED)


def _dense(config: ConfigReader) -> DenseSpec:
    name = config.text("hidden_activation", default="gelu_pytorch_tanh")
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise config.fail("hidden_activation", f"is {name[:60]!r}; supported are {known}")
    return DenseSpec(config.integer("intermediate_size"), ACTIVATIONS[name])


def _layer_types(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """`layer_types` when given, else every `sliding_window_pattern`-th layer sees everything."""
    kinds = config.texts("layer_types", length=num_layers)
    for kind in kinds or ():
        if kind not in LAYER_TYPES:
            raise config.fail("layer_types", f"has {kind[:60]!r}; supported are {LAYER_TYPES}")
    pattern = config.integer("sliding_window_pattern", high=1024, default=6)
    return kinds or tuple(
        "sliding_attention" if (index + 1) % pattern else "full_attention"
        for index in range(num_layers)
    )


def _ropes(config: ConfigReader) -> tuple[RopeSpec, RopeSpec]:
    """Positions of full and of sliding layers, from either generation of keys."""
    head_dim = config.integer("head_dim", high=4096, default=256)
    positions = config.integer("max_position_embeddings", high=MAX_POSITIONS, default=131_072)
    newer = config.section("rope_parameters")
    parts = [newer and newer.section(kind) for kind in LAYER_TYPES]
    local = config.number("rope_local_base_freq", default=LOCAL_THETA, low=1.0, high=1e15)
    thetas = (DEFAULTS.rope_theta, local)
    older = {key: config.values[key] for key in ("rope_theta", "rope_scaling") if config.has(key)}
    full, sliding = (
        read_rope(
            ConfigReader(
                {"rope_parameters": part.values} if part else (older if index == 0 else {}),
                config.path,
            ),
            head_dim=head_dim,
            default_theta=thetas[index],
            max_positions=positions,
        )
        for index, part in enumerate(parts)
    )
    return full, sliding
