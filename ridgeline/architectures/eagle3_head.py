"""What is an EAGLE-3 head? One layer that drafts from a model's own hidden states, as data.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025, and the checkpoints that its authors and others publish (configs of
LlamaForCausalLMEagle3; Eagle3Speculator puts the layer's keys into `transformer_layer_config`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.llama import read as read_llama
from ridgeline.architectures.spec import DenseSpec, ModelSpec
from ridgeline.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
NUM_TAPS = 3
_LAYER = "transformer_layer_config"
_IDS = "eagle_aux_hidden_state_layer_ids"
_UNSERVED = ("norm_before_fc", "norm_after_fc", "parallel_drafting")  # of newer heads


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """`model` is the layer as a model of one, whose ids are those that the head can draft. It reads
    the states of `target_hidden_size` numbers before the target's layers `taps`, low to high.
    `norm_before_residual`: the normed states are also what the layer adds to."""

    model: ModelSpec
    target_hidden_size: int
    num_target_ids: int
    taps: tuple[int, ...]
    norm_before_residual: bool

    @property
    def shares_embedding(self) -> bool:
        """Tokens can be looked up in the target's matrix."""
        return self.model.hidden_size == self.target_hidden_size


def is_eagle3(config: Mapping[str, object]) -> bool:
    """A config.json of such a head."""
    names = config.get("architectures")
    return isinstance(names, Sequence) and any(name in ARCHITECTURES for name in names)


def read_eagle3(config: Mapping[str, object], target: ModelSpec) -> EagleSpec:
    """ConfigError says what does not go with this target, or is not read by this version."""
    if not is_eagle3(config):
        raise ConfigError(
            f"config.json: architectures is {config.get('architectures')!r}; an EAGLE-3 head has "
            f"one of {', '.join(ARCHITECTURES)}"
        )
    outer = ConfigReader(config)
    layer = outer.section(_LAYER)
    values = {**config, **layer.values} if layer is not None else dict(config)
    for key in _UNSERVED:
        ConfigReader(values).refuse(key, False)
    values |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    reader = ConfigReader(values)
    if (kind := reader.text("model_type", default="llama")) != "llama":
        raise reader.fail(
            "model_type", f"is {kind[:60]!r}; heads are read whose layer is a llama's"
        )
    model = read_llama(reader, None)
    ids = reader.integer("draft_vocab_size", high=model.vocab_size, default=model.vocab_size)
    if model.vocab_size != target.vocab_size:
        raise reader.fail(
            "vocab_size",
            f"is {model.vocab_size} and the model's {target.vocab_size}; the head is for another"
            " model",
        )
    states = reader.integer("target_hidden_size", default=model.hidden_size)
    if states != target.hidden_size:
        raise ConfigError(
            f"the head reads hidden states of {states} numbers and the model's have "
            f"{target.hidden_size}; it is for another model"
        )
    speculator = layer is not None
    return EagleSpec(
        replace(model, vocab_size=ids),
        states,
        target.vocab_size,
        _taps(reader, target.num_layers),
        reader.flag("norm_before_residual", default=speculator),
    )


def _taps(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Layers before which states are read. Heads that name theirs count in two ways: from a first
    of 1 they name layers after which they read (https://github.com/sgl-project/sglang/pull/25454).
    """
    inner = reader.section("eagle_config")
    where = inner if inner is not None and inner.has(_IDS) else reader
    if not where.has(_IDS):
        usual = (2, num_layers // 2, num_layers - 3)
        if min(usual) < 0:
            raise ConfigError(f"a model of {num_layers} layers is too short for an EAGLE-3 head")
        return usual
    ids = _numbers(where)
    taps = tuple(one + (ids[0] == 1) for one in ids)
    if not all(0 <= tap <= num_layers for tap in taps):
        raise where.fail(_IDS, f"is {list(ids)}; the model has {num_layers} layers")
    return taps


def _numbers(reader: ConfigReader) -> tuple[int, ...]:
    value = reader.values[_IDS]
    found = tuple(value) if isinstance(value, list | tuple) else ()
    if len(found) != NUM_TAPS or not all(type(one) is int for one in found):
        raise reader.fail(_IDS, f"must be {NUM_TAPS} numbers of layers")
    return found


def eagle3_names(names: Collection[str]) -> dict[str, str]:
    """Role -> name among those of a checkpoint: fc, hidden_norm, d2t, and those of a llama, with
    "embedding" and "d2t" only where they are there. ConfigError if it is no such checkpoint."""
    found = {name.removeprefix("model."): name for name in names}
    stem = "midlayer." if any(name.startswith("midlayer.") for name in found) else "layers.0."
    if any(name.startswith("layers.1.") for name in found):
        raise ConfigError("the EAGLE-3 head has several layers; heads of one layer are read")
    roles = {
        "fc": "fc.weight",
        "norm": "norm.weight",
        "lm_head": "lm_head.weight",
        "hidden_norm": f"{stem}hidden_norm.weight",
        "input_norm": f"{stem}input_layernorm.weight",
        "pre_feed_forward_norm": f"{stem}post_attention_layernorm.weight",
        **{role: f"{stem}self_attn.{role}_proj.weight" for role in "qkvo"},
        **{role: f"{stem}mlp.{role}_proj.weight" for role in ("gate", "up", "down")},
    }
    missing = [name for name in roles.values() if name not in found]
    if missing:
        raise ConfigError(f"the EAGLE-3 head lacks {missing[0]!r}, and {len(missing) - 1} more")
    optional = {"embedding": "embed_tokens.weight", "d2t": "d2t"}
    roles |= {role: name for role, name in optional.items() if name in found}
    return {role: found[name] for role, name in roles.items()}


def eagle3_shapes(spec: EagleSpec) -> dict[str, tuple[int, ...]]:
    """Role -> shape of what every head has."""
    model, layer = spec.model, spec.model.layers[0]
    attention, inner = layer.attention, layer.feed_forward
    width = model.hidden_size
    if not isinstance(inner, DenseSpec) or attention.qkv_bias or attention.out_bias or inner.bias:
        raise ConfigError("EAGLE-3 heads with experts or biases are not read by this version")
    queries, keys = (
        heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads)
    )
    norms = ("norm", "hidden_norm", "input_norm", "pre_feed_forward_norm")
    return {
        "fc": (width, NUM_TAPS * spec.target_hidden_size),
        "lm_head": (model.vocab_size, width),
        "q": (queries, 2 * width),
        "k": (keys, 2 * width),
        "v": (keys, 2 * width),
        "o": (width, queries),
        "gate": (inner.intermediate_size, width),
        "up": (inner.intermediate_size, width),
        "down": (width, inner.intermediate_size),
        **dict.fromkeys(norms, (width,)),
    }
