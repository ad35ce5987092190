"""What do all our model families read from a config.json in the same way?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ridgeline.architectures.config_reader import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    ConfigReader,
)
from ridgeline.architectures.rope_config import (
    POSITION_KEYS,
    check_context,
    read_rope,
    read_two_ropes,
)
from ridgeline.architectures.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    NormKind,
    NormPlaces,
    RopeSpec,
    TensorLayout,
)

# Config names -> ours. `gelu_new`, `gelu_fast` and `gelu_pytorch_tanh` are the same tanh formula.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
DTYPES = ("float32", "bfloat16", "float16")
FeedForwardSpec = DenseSpec | ExpertsSpec
MAX_EXPERTS = 4096
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Defaults:
    """What Transformers assumes for a family's missing keys. `num_kv_heads` None: as many as
    query heads. `head_dim` None: hidden size by heads, as where a config says null. `norm_key`:
    where `norm_eps` is."""

    rope_theta: float
    norm_eps: float
    max_positions: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm_key: str = "rms_norm_eps"
    rotated_share: float | None = None  # None: partial_rotary_factor is refused


@dataclass(frozen=True, slots=True)
class Trunk:
    """The sizes that every family has, read and checked."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: RopeSpec
    norm_eps: float

    def attention(
        self,
        *,
        window: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norms_all_heads: bool = False,
    ) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            window=window,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
            norms_all_heads=norms_all_heads,
        )


def read_trunk(config: ConfigReader, defaults: Defaults, max_model_len: int | None) -> Trunk:
    _refuse_foreign(config)
    hidden_size = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = config.integer(
        "num_key_value_heads", high=MAX_HEADS, default=_kv_heads(config, defaults, heads)
    )
    if heads % kv_heads:
        raise config.fail(
            "num_key_value_heads", f"is {kv_heads}; it must divide num_attention_heads ({heads})"
        )
    max_positions = config.integer(
        "max_position_embeddings", high=MAX_POSITIONS, default=defaults.max_positions
    )
    head_dim = _head_dim(config, defaults, hidden_size, heads)
    rope = read_rope(
        config,
        head_dim=head_dim,
        default_theta=defaults.rope_theta,
        max_positions=max_positions,
        rotated_share=defaults.rotated_share,
    )
    check_context(rope, max_positions, max_model_len)
    return Trunk(
        vocab_size=config.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden_size,
        num_layers=read_num_layers(config),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rope=rope,
        norm_eps=config.number(defaults.norm_key, default=defaults.norm_eps, low=0.0, high=1.0),
    )


def read_trunk_of_two_ropes(
    config: ConfigReader, defaults: Defaults, local_theta: float, max_model_len: int | None
) -> tuple[Trunk, RopeSpec]:
    """With the positions of layers that see everything; and those of layers with a window."""
    trunk = read_trunk(config.without(*POSITION_KEYS), defaults, None)
    full, local = read_two_ropes(
        config,
        head_dim=trunk.head_dim,
        thetas=(defaults.rope_theta, local_theta),
        max_positions=trunk.max_positions,
    )
    for rope in (full, local):
        check_context(rope, trunk.max_positions, max_model_len)
    return replace(trunk, rope=full), local


def read_num_layers(config: ConfigReader) -> int:
    return config.integer("num_hidden_layers", high=MAX_LAYERS)


def _kv_heads(config: ConfigReader, defaults: Defaults, heads: int) -> int:
    """An explicit null means as many as query heads; a missing key, the family's default."""
    if defaults.num_kv_heads is None or "num_key_value_heads" in config.values:
        return heads
    return defaults.num_kv_heads


def _head_dim(config: ConfigReader, defaults: Defaults, hidden_size: int, heads: int) -> int:
    if config.has("head_dim"):
        return config.integer("head_dim", high=4096)
    if defaults.head_dim is not None and "head_dim" not in config.values:
        return defaults.head_dim
    if hidden_size % heads:
        raise config.fail(
            "hidden_size",
            f"is {hidden_size}; it must be a multiple of num_attention_heads ({heads})"
            " when head_dim is not given",
        )
    return hidden_size // heads


def _refuse_foreign(config: ConfigReader) -> None:
    """Keys of other designs that would change every number."""
    config.refuse("is_encoder_decoder", False)
    config.refuse("add_cross_attention", False)
    config.refuse("use_bidirectional_attention", False)


def activation(config: ConfigReader, default: str = "silu", key: str = "hidden_act") -> str:
    name = config.text(key, default=default)
    if name not in ACTIVATIONS:
        raise config.fail(key, f"is {name[:60]!r}; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def dense(
    config: ConfigReader,
    *,
    bias: bool = False,
    gated: bool = True,
    default: str = "silu",
    key: str = "hidden_act",
) -> DenseSpec:
    """`default`: the activation of the family where `key` does not say it."""
    size = config.integer("intermediate_size")
    return DenseSpec(size, activation(config, default, key), bias, gated)


def layer_types(config: ConfigReader, num_layers: int, *, full_every: int) -> tuple[str, ...]:
    """`layer_types` when given, else each layer of that number sees everything, and the others look
    back on a window."""
    kinds = config.texts("layer_types", length=num_layers)
    for kind in kinds or ():
        if kind not in LAYER_TYPES:
            raise config.fail("layer_types", f"has {kind[:60]!r}; supported are {LAYER_TYPES}")
    return kinds or tuple(LAYER_TYPES[index % full_every > 0] for index in range(1, num_layers + 1))


def routed(
    config: ConfigReader,
    numbers: tuple[str, ...],
    *,
    size: str = "moe_intermediate_size",
    num_experts: int | None = None,
    num_active: int | None = None,
) -> ExpertsSpec:
    """Experts by the keys that say how many there are (the first that is there) and how wide; the
    other two are defaults."""
    key = next((one for one in numbers if config.has(one)), numbers[0])
    total = config.integer(key, high=MAX_EXPERTS, default=num_experts)
    return ExpertsSpec(
        num_experts=total,
        num_active=config.integer("num_experts_per_tok", high=total, default=num_active),
        intermediate_size=config.integer(size),
        activation=activation(config),
    )


def in_groups(
    config: ConfigReader,
    experts: ExpertsSpec,
    *,
    group_best: int,
    defaults: tuple[int, int] = (1, 1),
) -> ExpertsSpec:
    """The same, chosen from the best `topk_group` of `n_group` groups; `defaults` are of both."""
    total = experts.num_experts
    groups = config.integer("n_group", high=total, default=defaults[0])
    if total % groups or total // groups < group_best:
        reason = f"is {groups}; it must divide {total} experts, with {group_best} or more in each"
        raise config.fail("n_group", reason)
    active = config.integer("topk_group", high=groups, default=min(groups, defaults[1]))
    if active * (total // groups) < experts.num_active:
        reason = f"is {active}, whose {active * (total // groups)} experts are fewer than"
        raise config.fail("topk_group", f"{reason} num_experts_per_tok ({experts.num_active})")
    if active == groups:
        return experts
    return replace(experts, num_groups=groups, num_active_groups=active, group_best=group_best)


def mixed(
    config: ConfigReader, experts: ExpertsSpec, num_layers: int
) -> tuple[FeedForwardSpec, ...]:
    """The feed-forward of each layer by the rules of Qwen: every `decoder_sparse_step`-th layer has
    experts, unless it is one of `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", high=MAX_LAYERS, default=1)
    dense_ones = config.values.get("mlp_only_layers") or []
    if not isinstance(dense_ones, list) or not all(isinstance(one, int) for one in dense_ones):
        raise config.fail("mlp_only_layers", "must be a list of numbers of layers")
    has_experts = [
        (index + 1) % step == 0 and index not in dense_ones for index in range(num_layers)
    ]
    between = experts if all(has_experts) else dense(config)
    return tuple(experts if one else between for one in has_experts)


def sliding_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer by the rules of Qwen: `layer_types` when given, else the layers
    from `max_window_layers` on, and none at all unless `use_sliding_window`."""
    is_listed = config.has("layer_types")
    kinds = layer_types(config, num_layers, full_every=1) if is_listed else None
    if not config.flag("use_sliding_window", default=False) or (
        "sliding_window" in config.values and not config.has("sliding_window")
    ):
        if "sliding_attention" in (kinds or ()):
            raise config.fail("layer_types", "has sliding_attention but use_sliding_window is off")
        return (None,) * num_layers
    window = config.integer("sliding_window", high=MAX_POSITIONS, default=4096)
    first = config.integer("max_window_layers", low=0, high=MAX_POSITIONS, default=28)
    slides = (
        [kind == "sliding_attention" for kind in kinds]
        if kinds is not None
        else [index >= first for index in range(num_layers)]
    )
    return tuple(window if slide else None for slide in slides)


def one_window(config: ConfigReader, num_layers: int, default: int | None) -> int | None:
    """The window of all layers by the rules of Mistral: `sliding_window`, null for none."""
    window: int | None = default
    if "sliding_window" in config.values:
        window = (
            config.integer("sliding_window", high=MAX_POSITIONS)
            if config.has("sliding_window")
            else None
        )
    kinds = config.texts("layer_types", length=num_layers)
    wanted = "full_attention" if window is None else "sliding_attention"
    if kinds is not None and set(kinds) != {wanted}:
        raise config.fail("layer_types", f"must be {wanted} everywhere in this model family")
    return window


def shared_caches(
    config: ConfigReader, attention: tuple[AttentionSpec, ...]
) -> tuple[AttentionSpec, ...]:
    """Which layers read the keys and values of an earlier one: with `cla_share_factor` all but the
    first of so many (arXiv 2405.12981), if `use_cla` is on; with `num_kv_shared_layers` that
    many last ones, each those of the last layer before them with its window (Gemma 3n)."""
    num_layers = len(attention)
    share = config.integer("cla_share_factor", default=1, high=num_layers)
    if not config.flag("use_cla", default=False):
        share = 1
    num_reading = config.integer("num_kv_shared_layers", low=0, default=0, high=num_layers - 1)
    first = num_layers - num_reading
    last_of = {one.window: index for index, one in enumerate(attention[:first])}
    owners: list[int | None] = []
    for index, own in enumerate(attention):
        owner = index - index % share
        if share > 1 and attention[owner].window != own.window:
            raise config.fail("cla_share_factor", "shares layers with different windows")
        if index >= first:
            if own.window not in last_of:
                raise config.fail("num_kv_shared_layers", "leaves no layer of the same window")
            owner = last_of[own.window] - last_of[own.window] % share
        owners.append(None if owner == index else owner)
    is_special = any(own.latent or own.sinks or own.norms_rotated for own in attention)
    if is_special and any(owner is not None for owner in owners):
        raise config.fail("use_cla", "and sharing are for plain attention, not for this family's")
    return tuple(
        replace(own, cache_layer=owner) for own, owner in zip(attention, owners, strict=True)
    )


def model_spec(
    config: ConfigReader,
    trunk: Trunk,
    *,
    family: str,
    attention: tuple[AttentionSpec, ...],
    feed_forward: FeedForwardSpec | tuple[FeedForwardSpec, ...],
    tensor_names: Mapping[str, str],
    norms: NormPlaces = "before",
    norm_kind: NormKind = "rms",
    tied: bool = False,
    tensor_layouts: tuple[TensorLayout, ...] = (),
    parallel_norms: int = 0,
    written: tuple[tuple[str, str], ...] = (),
) -> ModelSpec:
    """`feed_forward` is that of every layer, or one for each; `norms` are those of every layer.
    `tied`: the output matrix is the embedding, unless the config says otherwise."""
    attention = shared_caches(config, attention)
    inner = feed_forward if isinstance(feed_forward, tuple) else (feed_forward,) * trunk.num_layers
    bos = config.token_ids("bos_token_id", vocab_size=trunk.vocab_size)
    return ModelSpec(
        family=family,
        vocab_size=trunk.vocab_size,
        hidden_size=trunk.hidden_size,
        layers=tuple(
            LayerSpec(*both, norms=norms, norm_kind=norm_kind, parallel_norms=parallel_norms)
            for both in zip(attention, inner, strict=True)
        ),
        norm_eps=trunk.norm_eps,
        tie_embeddings=config.flag("tie_word_embeddings", default=tied),
        max_position_embeddings=trunk.max_positions,
        dtype=read_dtype(config),
        tensor_names=tensor_names,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=config.token_ids("eos_token_id", vocab_size=trunk.vocab_size),
        norm_kind=norm_kind,
        tensor_layouts=tensor_layouts,
        written=written,
    )


def read_dtype(config: ConfigReader) -> str:
    """`dtype` (newer files) or `torch_dtype`, float32 when neither is there."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text(key, default="float32").removeprefix("torch.")
    if name not in DTYPES:
        raise config.fail(key, f"is {name[:60]!r}; supported are {', '.join(DTYPES)}")
    return name
