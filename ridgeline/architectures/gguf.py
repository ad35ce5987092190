"""Which config.json would describe the model of a GGUF file, and what does it call its tensors?

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md . Names of tensors and the order of
rows are those that llama.cpp's converter writes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ridgeline.architectures import FAMILIES, OWN_TENSORS
from ridgeline.architectures.config_reader import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    ConfigReader,
)
from ridgeline.architectures.gguf_experts import NEXTN, num_drafting_layers
from ridgeline.architectures.gguf_families import (
    DIALECTS,
    LOG_MULTIPLIER,
    Dialect,
    dialect_of,
    names_of,
    own_config,
)
from ridgeline.architectures.parts import layer_tensors, shared_tensors, with_biases
from ridgeline.architectures.rope_config import SHARE, longrope_growth
from ridgeline.architectures.spec import ModelSpec
from ridgeline.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]


# Families whose rows of q and k lie as llama.cpp rotates them, pair by pair, where a safetensors
# checkpoint has the halves of each head.
INTERLEAVED = (
    "arcee", "granite", "granitemoe", "granitemoeshared", "llama", "mixtral", "smollm3",
)  # fmt: skip
# Their files say that they are a llama, an olmo2, a granitemoe, or a deepseek2 as that of a
# DeepSeek-V3 does.
AS_OTHERS = ("deepseek_v2", "granitemoeshared", "kimi_k2", "mistral", "mixtral", "olmo3")
OTHER_LAYOUTS = ("gemma3", "glm")  # their files are not read

EMBEDDING, OUTPUT, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_BLOCK = "blk.{layer}."
# Role in `ModelSpec.tensor_names` -> name in the file.
NAMES: Mapping[str, str] = {
    "embedding": EMBEDDING,
    "positions": "position_embd.weight",
    "lm_head": OUTPUT,
    **with_biases(
        {
            "norm": "output_norm",
            "input_norm": f"{_BLOCK}attn_norm",
            "pre_feed_forward_norm": f"{_BLOCK}ffn_norm",
        }
    ),
    "post_attention_norm": f"{_BLOCK}post_attention_norm.weight",
    "post_feed_forward_norm": f"{_BLOCK}post_ffw_norm.weight",
    "q_norm": f"{_BLOCK}attn_q_norm.weight",
    "k_norm": f"{_BLOCK}attn_k_norm.weight",
    "q_a_norm": f"{_BLOCK}attn_q_a_norm.weight",
    "kv_a_norm": f"{_BLOCK}attn_kv_a_norm.weight",
    "sinks": f"{_BLOCK}attn_sinks.weight",
    "score_bias": f"{_BLOCK}exp_probs_b.bias",
    **with_biases(
        {
            "q": f"{_BLOCK}attn_q",
            "k": f"{_BLOCK}attn_k",
            "v": f"{_BLOCK}attn_v",
            "o": f"{_BLOCK}attn_output",
            "q_a": f"{_BLOCK}attn_q_a",
            "q_b": f"{_BLOCK}attn_q_b",
            "kv_a": f"{_BLOCK}attn_kv_a_mqa",
            "kv_b": f"{_BLOCK}attn_kv_b",
            "router": f"{_BLOCK}ffn_gate_inp",
            "shared_score": f"{_BLOCK}ffn_gate_inp_shexp",
            **{
                f"{prefix}{role}": f"{_BLOCK}ffn_{role}{suffix}"
                for prefix, suffix in (("", ""), ("expert_", "_exps"), ("shared_", "_shexp"))
                for role in ("gate", "up", "down")
            },
        }
    ),
}
# Newer files of latent attention have what makes keys (transposed, head by head) apart from what
# makes values.
KEYS_UP, VALUES_UP = f"{_BLOCK}attn_k_b.weight", f"{_BLOCK}attn_v_b.weight"

# Keys that would change every number, with the values that do not.
FOREIGN: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}

GROWTH, ATTENTION_FACTOR = "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"

# Llama 3's scaling is in the file as one divisor per frequency, without what they were made of.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_LENGTH = 1.0, 4.0, 8192


def readable_families() -> list[str]:
    """What general.architecture of a file may be: a family that is served, by its own name."""
    others = {one.family: name for name, one in DIALECTS.items()}
    own = (name for name in FAMILIES if name not in (*AS_OTHERS, *OTHER_LAYOUTS))
    return [others.get(name, name) for name in own]


def family_of(metadata: Mapping[str, object], source: str) -> str:
    """The model_type of the file. ConfigError names the architecture when it is not read."""
    reader = ConfigReader(metadata, source=source)
    kind = reader.text("general.type", default="model")
    if kind != "model":
        raise reader.fail("general.type", f"is {kind[:60]!r}; only a model can be served")
    name = reader.text("general.architecture")
    if name not in readable_families():
        known = ", ".join(readable_families())
        reason = f"is {name[:60]!r}; GGUF files are read of {known}, others from safetensors"
        raise reader.fail("general.architecture", reason)
    return name


def config_of(
    metadata: Mapping[str, object],
    shapes: Shapes,
    *,
    dtype: str,
    rope_factors: Mapping[str, Sequence[float]],
    source: str,
) -> dict[str, object]:
    """What config.json would say. `shapes` are those of the tensors, `rope_factors` the numbers of
    those for rotations; `source` is the file. ConfigError names the key."""
    name = family_of(metadata, source)
    own = {key[len(name) + 1 :]: v for key, v in metadata.items() if key.startswith(f"{name}.")}
    reader = ConfigReader(own, f"{name}.", source)
    dialect = dialect_of(name)
    for key, harmless in FOREIGN.items():
        if key not in dialect.meant:
            reader.refuse(key, *harmless)
    if ConfigReader(metadata, source=source).integer("split.count", low=0, default=0) > 1:
        raise ConfigError(
            f"{source}: split.count says that this is one of several files; merge them first "
            "(llama-gguf-split --merge)"
        )
    config: dict[str, object] = {"model_type": dialect.family or name, "torch_dtype": dtype}
    config |= _sizes(reader, shapes, source, dialect)
    config |= {OWN_TENSORS: True, **own_config(name, reader, shapes)}
    config |= _rope(reader, config, rope_factors, dialect)
    config |= _tokens(ConfigReader(metadata, source=source), config)
    return config


def _sizes(
    reader: ConfigReader, shapes: Shapes, source: str, dialect: Dialect
) -> dict[str, object]:
    hidden = reader.integer("embedding_length")
    heads = reader.integer("attention.head_count", high=MAX_HEADS)
    kv_heads = reader.integer("attention.head_count_kv", high=MAX_HEADS, default=heads)
    if heads % kv_heads:
        reason = f"is {kv_heads}; it must divide attention.head_count ({heads})"
        raise reader.fail("attention.head_count_kv", reason)
    embedding = shapes.get(EMBEDDING, ())
    if len(embedding) != 2 or not 1 <= embedding[0] <= MAX_VOCAB:
        raise ConfigError(f"{source}: tensor {EMBEDDING!r} is missing, or no matrix of tokens")
    vocab = embedding[0]
    if reader.integer("vocab_size", high=MAX_VOCAB, default=vocab) != vocab:
        raise reader.fail("vocab_size", f"is not the {vocab} rows of {EMBEDDING}")
    kind = "layer_norm_epsilon" if dialect.eps else "layer_norm_rms_epsilon"
    eps = reader.number(f"attention.{kind}", default=None, low=0.0, high=1.0)
    return {
        **({} if dialect.is_latent else _head(reader, hidden, heads, dialect.rotates_part)),
        "hidden_size": hidden,
        "num_hidden_layers": reader.integer("block_count", high=MAX_LAYERS)
        - num_drafting_layers(reader),
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": reader.integer("context_length", high=MAX_POSITIONS),
        dialect.eps or "rms_norm_eps": decimal(eps),
        "vocab_size": vocab,
        "tie_word_embeddings": OUTPUT not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "hidden_act": "silu",
    }


def drafting_blocks(metadata: Mapping[str, object]) -> tuple[str, ...]:
    """How names of tensors begin that are for drafting alone, of a file that `config_of` reads."""
    name = str(metadata["general.architecture"])
    reader = ConfigReader({key: metadata.get(f"{name}.{key}") for key in ("block_count", NEXTN)})
    last = reader.integer("block_count") - 1
    return tuple(f"blk.{last - at}." for at in range(num_drafting_layers(reader)))


def _head(reader: ConfigReader, hidden: int, heads: int, rotates_part: bool) -> dict[str, object]:
    if not reader.has("attention.key_length") and hidden % heads:
        reason = f"is {heads}; it must divide embedding_length ({hidden})"
        raise reader.fail("attention.head_count", reason)
    head_dim = reader.integer("attention.key_length", high=4096, default=max(1, hidden // heads))
    keys = ("attention.value_length", "rope.dimension_count")
    for key in keys[: 1 if rotates_part else 2]:
        if reader.integer(key, high=4096, default=head_dim) != head_dim:
            raise reader.fail(key, f"is not the size of a head ({head_dim}), which is not served")
    if not rotates_part:
        return {"head_dim": head_dim}
    rotated = reader.integer("rope.dimension_count", high=head_dim, default=head_dim)
    return {"head_dim": head_dim, SHARE: rotated / head_dim}


def _rope(
    reader: ConfigReader,
    config: Mapping[str, object],
    factors: Mapping[str, Sequence[float]],
    dialect: Dialect,
) -> dict[str, object]:
    theta = decimal(reader.number("rope.freq_base", default=10_000.0, low=1.0, high=1e15))
    kind = reader.text("rope.scaling.type", default="none")
    old = reader.number("rope.scale_linear", default=1.0, low=1e-3, high=1e6)
    if kind == "none" and old != 1.0:
        kind = "linear"
    found: dict[str, object] = {"rope_theta": theta}
    if kind not in ("none", "linear", "yarn"):
        raise reader.fail("rope.scaling.type", f"is {kind[:60]!r}; read are none, linear, yarn")
    if kind != "yarn":
        reader.refuse(ATTENTION_FACTOR, 1.0)
    if factors.keys() <= {ROPE_FACTORS}:
        reader.refuse(GROWTH, 1.0)
    if factors:
        if kind != "none":
            raise reader.fail("rope.scaling.type", f"is {kind!r} beside {next(iter(factors))}")
        if ROPE_FACTORS not in factors:
            return found | _longrope(reader, factors)
        scaling = _llama3(reader, theta, config["head_dim"], factors[ROPE_FACTORS])
        return found | ({} if scaling is None else {"rope_scaling": scaling})
    if kind == "none":
        return found
    factor = decimal(reader.number("rope.scaling.factor", default=old, low=1e-3, high=1e6))
    if kind == "linear":
        return found | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    length = reader.integer("rope.scaling.original_context_length", high=MAX_POSITIONS)
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    yarn |= dialect.yarn
    if LOG_MULTIPLIER in dialect.meant and reader.has(LOG_MULTIPLIER):
        # Of a tenth of it, as the one that scales rotations, which cancel each other.
        tenth = decimal(reader.number(LOG_MULTIPLIER, default=None, low=0.0, high=1e3))
        yarn |= dict.fromkeys(("mscale", "mscale_all_dim"), decimal(10 * tenth))
    if reader.number(ATTENTION_FACTOR, default=1.0, low=0.0, high=1e3) != 1.0:
        factor = reader.number(ATTENTION_FACTOR, default=None, low=0.0, high=1e3)
        yarn["attention_factor"] = decimal(factor)
    for key in ("beta_fast", "beta_slow"):
        if reader.has(f"rope.scaling.yarn_{key}"):
            given = reader.number(f"rope.scaling.yarn_{key}", default=None, low=0.0, high=1e6)
            yarn[key] = decimal(given)
    return found | {"rope_scaling": yarn}


def _longrope(reader: ConfigReader, factors: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """Of files that have divisors for texts within the length the model was trained for, and for
    longer ones."""
    for name in (LONG_FACTORS, SHORT_FACTORS):
        if name not in factors:
            raise ConfigError(
                f"{reader.source}: lacks tensor {name!r} beside {next(iter(factors))!r}"
            )
    context = reader.integer("context_length", high=MAX_POSITIONS)
    original = reader.integer(
        "rope.scaling.original_context_length", high=MAX_POSITIONS, default=context
    )
    growth = longrope_growth(context / original, original)
    if not math.isclose(
        reader.number(GROWTH, default=growth, low=0.0, high=1e3), growth, rel_tol=1e-5
    ):
        raise reader.fail(
            GROWTH, f"is not the {growth:g} of a context of {original} that grew to {context}"
        )
    scaling = {
        "rope_type": "longrope",
        "long_factor": [decimal(one) for one in factors[LONG_FACTORS]],
        "short_factor": [decimal(one) for one in factors[SHORT_FACTORS]],
    }
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _llama3(
    reader: ConfigReader, theta: float, head_dim: object, factors: Sequence[float]
) -> dict[str, object] | None:
    """The scaling whose divisors these are; None when they divide nothing."""
    fail = ConfigError(
        f"{reader.source}: {ROPE_FACTORS} is not the scaling of Llama 3 (low_freq_factor "
        f"{LLAMA3_LOW:g}, high_freq_factor {LLAMA3_HIGH:g}, original length {LLAMA3_LENGTH}), "
        "and no other is read from a GGUF file"
    )
    if 2 * len(factors) != head_dim or not all(math.isfinite(f) and f >= 1.0 for f in factors):
        raise fail
    factor = max(factors)
    if factor == 1.0:
        return None
    length = reader.integer(
        "rope.scaling.original_context_length", high=MAX_POSITIONS, default=LLAMA3_LENGTH
    )
    wanted = [_divisor(theta ** (i / len(factors)), factor, length) for i in range(len(factors))]
    if not all(math.isclose(f, w, rel_tol=1e-4) for f, w in zip(factors, wanted, strict=True)):
        raise fail
    return {
        "rope_type": "llama3",
        "factor": decimal(factor),
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": length,
    }


def _divisor(inverse: float, factor: float, length: int) -> float:
    """By what Llama 3 divides a frequency of 1 / `inverse` (Transformers' rope_type llama3)."""
    turns = length / (2 * math.pi * inverse)
    share = (turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    share = min(1.0, max(0.0, share))
    return 1.0 / ((1.0 - share) / factor + share)


def _tokens(reader: ConfigReader, config: Mapping[str, object]) -> dict[str, object]:
    size = int(str(config["vocab_size"]))
    tokens = reader.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and len(tokens) > size:
        reason = f"has {len(tokens)} entries, {EMBEDDING} has {size} rows"
        raise reader.fail("tokenizer.ggml.tokens", reason)
    found: dict[str, object] = {}
    roles = {"bos": ("bos",), "eos": ("eos", "eot", "eom")}
    for role, names in roles.items():
        keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
        ids = [i for k in keys for i in reader.token_ids(k, vocab_size=size)]
        if ids:
            found[f"{role}_token_id"] = list(dict.fromkeys(ids))
    return found


def decimal(value: float) -> float:
    """The shortest decimal number that is the same float32: 1e-05 for 9.999999747378752e-06. A
    file has float32 where a config.json has what somebody typed."""
    try:
        single = struct.unpack("<f", struct.pack("<f", value))[0]
        for digits in range(1, 10):
            short = float(f"{single:.{digits}g}")
            if struct.unpack("<f", struct.pack("<f", short))[0] == single:
                return short
    except OverflowError:  # beyond float32: it was no float32
        return value
    return value


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter is in the file: in tensor `name`, which is of shape `whole` (empty: that of
    the parameter), from its number `first` on. Its rows are interleaved within each of `heads`
    heads; 0: they lie as they should. Its numbers are `offset` more than those of the checkpoint:
    what norms add to their weight is added in the file. `keys`: the first rows of each head, which
    make keys, are in that tensor instead, transposed; `cuts` are the heads and these rows of one.
    """

    name: str
    heads: int = 0
    whole: tuple[int, ...] = ()
    first: int = 0
    offset: float = 0.0
    keys: str = ""
    cuts: tuple[int, int] = (0, 0)


def sources(spec: ModelSpec, found: Collection[str] = ()) -> dict[str, Source]:
    """Checkpoint name -> where in the file, for every tensor that the model needs. `found`: names
    in the file, which tell older files from newer ones. ConfigError for a parameter that no such
    file has a name for."""
    own = {
        name: Source(NAMES[role], offset=spec.norm_offset if role == "norm" else 0.0)
        for role, name in _shared(spec).items()
    }
    names = {**NAMES, **names_of(spec)}
    for index in range(spec.num_layers):
        own |= _of_layer(spec, index, names, found)
    return own


def _by_role(spec: ModelSpec, index: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Role -> name and shape of each of its parameters, of which there is one for each expert, or
    for each head, or one alone."""
    roles: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, part in layer_tensors(spec, index).items():
        role = f"expert_{part.role}" if part.is_experts else part.role
        roles.setdefault(role, {})[name] = part.shape
    return roles


def _of_layer(
    spec: ModelSpec, index: int, names: Mapping[str, str], found: Collection[str]
) -> dict[str, Source]:
    attention, own = spec.layers[index].attention, dict[str, Source]()
    heads = {"q": attention.num_heads, "k": attention.num_kv_heads}
    roles = _by_role(spec, index)
    for role, several in roles.items():
        if role not in names:
            raise ConfigError(
                f"{next(iter(several))} has no place in a GGUF file that this version reads; serve "
                f"models of {spec.family} from safetensors"
            )
        base = role.removesuffix("_bias")
        kind = "weight" if base == role else "bias"
        shape = next(iter(several.values()))
        whole, before, stored = shape, 0, names[role].format(layer=index)
        for stem, together in _together(spec):
            name = f"{stem.format(layer=index)}.{kind}"
            if base in together and (name in found or not base.startswith("expert")):
                suffix, stored = role.removeprefix(base), name
                rows = [next(iter(roles[one + suffix].values()))[0] for one in together]
                whole = sum(rows), *shape[1:]
                before = sum(rows[: together.index(base)]) * prod(shape[1:])
        offset = spec.norm_offset if role.endswith("norm") else 0.0
        interleaved = heads.get(base, 0) if spec.family in INTERLEAVED else 0
        one = Source(stored, interleaved, whole, before, offset)
        latent, halves = attention.latent, KEYS_UP.format(layer=index)
        if role == "kv_b" and latent is not None and stored not in found and halves in found:
            values = VALUES_UP.format(layer=index)
            one = Source(values, keys=halves, cuts=(attention.num_heads, latent.qk_nope_head_dim))
        single = f"blk.{index}.ffn_{base.removeprefix('expert_')}.{{}}.{kind}"
        if base.startswith("expert") and stored not in found and single.format(0) in found:
            own |= {name: Source(single.format(at)) for at, name in enumerate(several)}
            continue
        for at, name in enumerate(several):
            stack = (len(several), *whole) if len(several) > 1 else whole
            own[name] = replace(one, whole=stack, first=before + at * prod(whole))
    return own


def _together(spec: ModelSpec) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Roles that are one tensor: in all files of this family, or of experts in some."""
    own = next((one.together for one in DIALECTS.values() if one.family == spec.family), ())
    return (*own, (f"{_BLOCK}ffn_gate_up_exps", ("expert_gate", "expert_up")))


def _shared(spec: ModelSpec) -> dict[str, str]:
    """Role -> name of the tensors that are no layer's."""
    needed = shared_tensors(spec)
    roles = ("embedding", "positions", "norm", "norm_bias", "lm_head")
    named = {role: spec.tensor_names[role] for role in roles if role in spec.tensor_names}
    return {role: name for role, name in named.items() if name in needed}
