"""How large are the parts of a model whose family has no reader of its own? Sizes for planning.

Each family is data: how its layers differ from those of a Llama, as far as size and traffic go.
`tests/architectures/test_catalogue.py` holds parameters and windows against the classes of Hugging
Face Transformers. Positions of other kinds are not described, and chunks count as windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ridgeline.architectures.config_reader import MAX_POSITIONS, ConfigReader
from ridgeline.architectures.deepseek_v3 import NAMES as DEEPSEEK_NAMES
from ridgeline.architectures.family import Defaults, FeedForwardSpec, Trunk, model_spec, read_trunk
from ridgeline.architectures.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)

MAX_EXPERTS = 4096
POSITIONS = ("rope_scaling", "rope_parameters", "partial_rotary_factor")  # not described
WINDOWED = ("sliding_attention", "chunked_attention")
DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-6, max_positions=2048)


@dataclass(frozen=True, slots=True)
class Experts:
    """The keys of config.json that say how many experts there are and how wide they are.

    `shared` is the width of what every token passes, `num_shared` how often `size` it is. Layers
    below `first` are dense, and of the others each `step`-th has experts, "": all. Dense layers
    are `dense_size` wide.
    """

    number: str = "num_experts"
    active: str = "num_experts_per_tok"
    size: str = "moe_intermediate_size"
    shared: str = ""
    num_shared: str = ""
    first: str = ""
    step: str = ""
    dense_size: str = "intermediate_size"
    scoring: str = "softmax"
    score_bias: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """`needs`: what the family computes and this version does not. Biases and norms of queries
    and keys: always, never, or as a key of config.json says. `full_every`: each layer of that
    number sees everything and the others look back on `window`; 1: none do, 0: all look back.
    `small`: names of SMALL, what a layer has besides."""

    needs: str
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    qk_norm: bool | str = False
    norms_all_heads: bool = False
    tied: bool = False
    head_dim: int | None = None
    window: str = "sliding_window"
    full_every: int = 1
    experts: Experts | None = None
    small: tuple[str, ...] = ()


# Numbers of a layer that its record has no field for.
SMALL: Mapping[str, Callable[[int, AttentionSpec, FeedForwardSpec], int]] = {
    "biases of norms": lambda width, attention, inner: 2 * width
}
MIXTURE = Experts("num_local_experts", size="intermediate_size")
DEEPSEEK_MIXTURE = Experts(
    "n_routed_experts",
    num_shared="n_shared_experts",
    first="first_k_dense_replace",
    scoring="sigmoid",
    score_bias=True,
)
LLAMA_4_MIXTURE = Experts(
    "num_local_experts",
    size="intermediate_size",
    shared="intermediate_size",
    step="interleave_moe_layer_step",
    dense_size="intermediate_size_mlp",
    scoring="sigmoid",
)
ERNIE_MIXTURE = Experts(
    "moe_num_experts",
    active="moe_k",
    num_shared="moe_num_shared_experts",
    first="moe_layer_start_index",
    score_bias=True,
)
READER = "a reader of its weights"
# model_type of config.json -> its layers
SHAPES: Mapping[str, Shape] = {
    "dots1": Shape("sigmoid scores of experts", qk_norm=True, experts=DEEPSEEK_MIXTURE),
    "ernie4_5": Shape("rotation of neighbouring numbers", qkv_bias="use_bias", out_bias="use_bias"),
    "ernie4_5_moe": Shape("rotation of neighbouring numbers", tied=True, experts=ERNIE_MIXTURE),
    "internlm3": Shape(READER, qkv_bias="qkv_bias"),
    "llama4_text": Shape(
        "attention in chunks", window="attention_chunk_size", full_every=4, experts=LLAMA_4_MIXTURE
    ),
    "minimax_m2": Shape(
        READER,
        qk_norm="use_qk_norm",
        norms_all_heads=True,
        experts=replace(MIXTURE, scoring="sigmoid", score_bias=True),
    ),
    "olmoe": Shape(
        READER, qk_norm=True, norms_all_heads=True, experts=Experts(size="intermediate_size")
    ),
    "phimoe": Shape(
        "norms with a bias",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        full_every=0,
        experts=MIXTURE,
        small=("biases of norms",),
    ),
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    """A config.json of one of SHAPES."""
    family = config.text("model_type")
    shape = SHAPES[family]
    # Other values would give some layers experts and others none.
    config.refuse("decoder_sparse_step", 1)
    config.refuse("mlp_only_layers", [])
    given = {"tie_word_embeddings": shape.tied, "head_dim": shape.head_dim, **config.values}
    filled = replace(config, values={k: v for k, v in given.items() if k not in POSITIONS})
    trunk = read_trunk(filled, DEFAULTS, max_model_len)
    trunk = replace(trunk, rope=RopeSpec(trunk.rope.theta, _rope_kind(config)))
    spec = model_spec(
        filled,
        trunk,
        family=family,
        attention=_attention(filled, shape, trunk),
        feed_forward=tuple(_feed_forward(filled, shape, i) for i in range(trunk.num_layers)),
        tensor_names=DEEPSEEK_NAMES,
    )
    layers = tuple(_with_rest(layer, shape, trunk.hidden_size) for layer in spec.layers)
    return replace(spec, layers=layers, unserved=shape.needs)


def _with_rest(layer: LayerSpec, shape: Shape, width: int) -> LayerSpec:
    parts = (SMALL[name](width, layer.attention, layer.feed_forward) for name in shape.small)
    return replace(layer, unlisted=sum(parts))


def _rope_kind(config: ConfigReader) -> str:
    """The name alone."""
    scaling = config.section("rope_scaling") or config.section("rope_parameters")
    if scaling is None:
        return "default"
    return scaling.text("rope_type" if scaling.has("rope_type") else "type", default="default")


def _attention(config: ConfigReader, shape: Shape, trunk: Trunk) -> tuple[AttentionSpec, ...]:
    def asked(value: bool | str) -> bool:
        return config.flag(value, default=False) if isinstance(value, str) else value

    full = trunk.attention(
        qkv_bias=asked(shape.qkv_bias),
        out_bias=asked(shape.out_bias),
        qk_norm=asked(shape.qk_norm),
        norms_all_heads=shape.norms_all_heads,
    )
    if shape.full_every == 1 or not config.has(shape.window):
        return (full,) * trunk.num_layers
    sliding = replace(full, window=config.integer(shape.window, high=MAX_POSITIONS))
    kinds = config.texts("layer_types", length=trunk.num_layers)
    looks_back = (
        [kind in WINDOWED for kind in kinds]
        if kinds is not None
        else [
            not shape.full_every or (index + 1) % shape.full_every > 0
            for index in range(trunk.num_layers)
        ]
    )
    return tuple(sliding if local else full for local in looks_back)


def _feed_forward(config: ConfigReader, shape: Shape, layer: int) -> FeedForwardSpec:
    keys = shape.experts
    key = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    activation = config.text(key, default="silu")
    if keys is None:
        bias = config.flag("mlp_bias", default=False)
        return DenseSpec(config.integer("intermediate_size"), activation, bias)
    step = config.integer(keys.step, default=1) if keys.step else 1
    first = config.integer(keys.first, low=0, default=0) if keys.first else 0
    if layer < first or (layer + 1) % step:
        return DenseSpec(config.integer(keys.dense_size), activation)
    size = config.integer(keys.size)
    number = config.integer(keys.number, high=MAX_EXPERTS)
    shared = config.integer(keys.shared, low=0) if keys.shared else 0
    if keys.num_shared:
        shared = size * config.integer(keys.num_shared, low=0, high=64, default=0)
    return ExpertsSpec(
        num_experts=number,
        num_active=config.integer(keys.active, high=number),
        intermediate_size=size,
        activation=activation,
        renormalize=config.flag("norm_topk_prob", default=True),
        shared_size=shared,
        scoring=keys.scoring,
        score_bias=keys.score_bias,
    )
