"""What is a Gemma 3? A Gemma 2 that norms each head of q and k in place of soft caps; five layers
look back on a window, with positions of their own, for each that sees everything.

The multimodal models have the language model in `text_config`; their image part is left out.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, layer_types, read_trunk_of_two_ropes
from ridgeline.architectures.gemma import gemma_spec
from ridgeline.architectures.gemma2 import NAMES, cap, full_and_sliding
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(
    rope_theta=1_000_000.0, norm_eps=1e-6, max_positions=131_072, num_kv_heads=4, head_dim=256
)
OUTER = ("torch_dtype", "dtype", "bos_token_id", "eos_token_id")  # keys beside `text_config`
IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")


def read_multimodal(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    text = config.section("text_config")
    if text is None:
        raise config.fail("text_config", "is missing (an object)")
    outer = {key: config.values[key] for key in OUTER if config.has(key)}
    spec = read(text.with_defaults(**outer), max_model_len)
    names = {role: f"language_model.{name}" for role, name in spec.tensor_names.items()}
    return replace(spec, tensor_names=names, left_out=IMAGE_PARTS)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    """A text-only config."""
    config = config.with_defaults(vocab_size=262_208, num_attention_heads=8)
    theta = config.number("rope_local_base_freq", default=10_000.0, low=1.0, high=1e15)
    trunk, local = read_trunk_of_two_ropes(config, DEFAULTS, theta, max_model_len)
    full, sliding = full_and_sliding(config, trunk)
    full, sliding = replace(full, qk_norm=True), replace(sliding, rope=local, qk_norm=True)
    every = config.integer("sliding_window_pattern", high=1024, default=6)
    kinds = layer_types(config, trunk.num_layers, full_every=every)
    attention = tuple(sliding if kind == "sliding_attention" else full for kind in kinds)
    spec = gemma_spec(config, trunk, "gemma3", attention, NAMES, norms="around")
    return replace(spec, logits_cap=cap(config, "final_logit_softcapping"))
