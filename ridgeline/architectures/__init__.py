"""Which model is this? A config.json in, a ModelSpec out; one file per family, data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_TENSORS, ConfigReader
from ridgeline.architectures.parts import (
    expected_tensors,
    is_ignored,
    leftover_tensors,
    optional_tensors,
)
from ridgeline.architectures.scheme_config import described
from ridgeline.architectures.shapes import SHAPES
from ridgeline.architectures.spec import ExpertsSpec, ModelSpec
from ridgeline.architectures.tensor_layouts import unstacked
from ridgeline.errors import ConfigError
from ridgeline.registry import load

__all__ = [
    "FAMILIES",
    "PLANNED_FAMILIES",
    "expected_tensors",
    "is_ignored",
    "leftover_tensors",
    "optional_tensors",
    "read_spec",
]

# model_type of config.json -> "module:function"
FAMILIES: dict[str, str] = {
    "arcee": "ridgeline.architectures.arcee:read",
    "cohere": "ridgeline.architectures.cohere:read",
    "cohere2": "ridgeline.architectures.cohere:read_second",
    "exaone4": "ridgeline.architectures.exaone4:read",
    "falcon": "ridgeline.architectures.falcon:read",
    "gemma": "ridgeline.architectures.gemma:read",
    "gemma2": "ridgeline.architectures.gemma2:read",
    "gemma3": "ridgeline.architectures.gemma3:read_multimodal",
    "gemma3_text": "ridgeline.architectures.gemma3:read",
    "glm": "ridgeline.architectures.glm4:read",
    "glm4": "ridgeline.architectures.glm4:read",
    "glm4_moe": "ridgeline.architectures.glm4_moe:read",
    "gpt2": "ridgeline.architectures.gpt2:read",
    "gpt_neox": "ridgeline.architectures.gpt_neox:read",
    "gpt_oss": "ridgeline.architectures.gpt_oss:read",
    "granite": "ridgeline.architectures.granite:read",
    "granitemoe": "ridgeline.architectures.granitemoe:read",
    "granitemoeshared": "ridgeline.architectures.granitemoe:read_shared",
    "hunyuan_v1_dense": "ridgeline.architectures.hunyuan:read",
    "llama": "ridgeline.architectures.llama:read",
    "minicpm3": "ridgeline.architectures.minicpm3:read",
    "mistral": "ridgeline.architectures.mistral:read",
    "mixtral": "ridgeline.architectures.mixtral:read",
    "olmo2": "ridgeline.architectures.olmo2:read",
    "olmo3": "ridgeline.architectures.olmo3:read",
    "phi3": "ridgeline.architectures.phi3:read",
    "qwen2": "ridgeline.architectures.qwen2:read",
    "qwen2_moe": "ridgeline.architectures.qwen2_moe:read",
    "qwen3": "ridgeline.architectures.qwen3:read",
    "qwen3_moe": "ridgeline.architectures.qwen3_moe:read",
    "seed_oss": "ridgeline.architectures.seed_oss:read",
    "smollm3": "ridgeline.architectures.smollm3:read",
    "stablelm": "ridgeline.architectures.stablelm:read",
    "starcoder2": "ridgeline.architectures.starcoder2:read",
    "deepseek_v2": "ridgeline.architectures.deepseek_v3:read",
    "deepseek_v3": "ridgeline.architectures.deepseek_v3:read",
    "kimi_k2": "ridgeline.architectures.deepseek_v3:read",
}
# Described, priced and planned for; `spec.check_served` says why they are not served.
PLANNED_FAMILIES: dict[str, str] = {**dict.fromkeys(SHAPES, "ridgeline.architectures.shapes:read")}
OWN_TENSORS = "ridgeline_own_tensors"  # true: each parameter is a tensor, as in a GGUF file
OWN_EXPERTS = "ridgeline_own_experts"  # true: each matrix of each expert is
CAUSAL = ("ForCausalLM", "ForConditionalGeneration")  # in names of classes that generate text


def read_spec(config: Mapping[str, object], *, max_model_len: int | None = None) -> ModelSpec:
    """The model that a config.json describes.

    `max_model_len` is only checked against what the model's positions can serve. ConfigError
    names the key that is missing, of a wrong type, out of range or not supported. A family that
    can only be planned for is read too: `spec.check_served` tells.
    """
    reader = ConfigReader(config)
    model_type = reader.text("model_type")
    families = {**PLANNED_FAMILIES, **FAMILIES}
    if model_type not in families:
        known, planned = ", ".join(sorted(FAMILIES)), ", ".join(sorted(PLANNED_FAMILIES))
        raise ConfigError(
            f"config.json: model_type is {model_type[:60]!r}; supported families are {known} "
            f"(and for planning alone {planned})"
        )
    spec = load(families, model_type, "model family")(reader, max_model_len)
    if not isinstance(spec, ModelSpec):
        raise ConfigError(f"model family {model_type!r} did not return a ModelSpec")
    if reader.flag(OWN_TENSORS, default=False):
        spec = replace(spec, tensor_layouts=())
    if reader.flag(OWN_EXPERTS, default=False):
        spec = unstacked(spec)
    _check_size(spec)
    if model_type in FAMILIES:
        _check_class(reader, model_type)
    # What can only be planned for is priced in any format, whatever its checkpoint has.
    return described(spec, reader) if model_type in FAMILIES else spec


def _check_size(spec: ModelSpec) -> None:
    """Each layer and each expert may be harmless, all of them together not."""
    inner = [layer.feed_forward for layer in spec.layers]
    experts = sum(one.num_experts for one in inner if isinstance(one, ExpertsSpec))
    if 3 * experts > MAX_TENSORS:
        raise ConfigError(
            f"config.json: {spec.num_layers} layers with {experts} experts together have at least "
            f"{3 * experts} tensors; at most {MAX_TENSORS} are read. Correct the number of experts"
        )


def _check_class(reader: ConfigReader, model_type: str) -> None:
    """`model_type` alone says how a model is read, as all tensors are compared with that. The class
    in `architectures` is only asked whether it generates text."""
    named = reader.values.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise reader.fail("architectures", "must be a list of names of classes")
    if named and not any(mark in one for one in named for mark in CAUSAL):
        raise reader.fail(
            "architectures",
            f"names {named[0][:60]!r}, which does not generate text ({CAUSAL[0]} is not in its"
            f" name); if the weights are those of a {model_type}, take the entry out: model_type"
            " alone says how a model is read",
        )
