"""What are a model's modules for multi-token prediction (MTP)? Its own draft heads, as data.

Source: DeepSeek-V3 Technical Report, 2024, section 2.2: a module puts the embedding of the next
token beside the hidden state, both normed, projects them to one state and runs one more layer of
the model; embedding and output matrix are the model's own. Two public layouts are read: that of
DeepSeek-V3 (`model.layers.N.eh_proj`) and that of MiMo (`model.mtp_layers.0.input_proj`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import count

from ridgeline.architectures.spec import DenseSpec, ModelSpec, missing
from ridgeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MTPLayout:
    """Where a family keeps a module, `{module}` counted from 0 or from the number of layers, and
    what it feeds it with. `takes_normed`: the model's states after its final norm, else before it;
    `gives_normed`: the same of what the next draft is made of."""

    name: str
    stem: str
    projection: str
    token_norm: str
    hidden_norm: str
    final_norm: str
    counts_layers: bool
    embedding_first: bool
    takes_normed: bool
    gives_normed: bool


LAYOUTS = (
    MTPLayout(
        "deepseek",
        "model.layers.{module}.",
        "eh_proj",
        "enorm",
        "hnorm",
        "shared_head.norm",
        counts_layers=True,
        embedding_first=True,
        takes_normed=True,
        gives_normed=False,
    ),
    MTPLayout(
        "mimo",
        "model.mtp_layers.{module}.",
        "input_proj",
        "token_layernorm",
        "hidden_layernorm",
        "final_layernorm",
        counts_layers=False,
        embedding_first=False,
        takes_normed=False,
        gives_normed=True,
    ),
)
_GATED = "mtp.fc.weight"  # of Qwen3-Next and its successors


@dataclass(frozen=True, slots=True)
class MTPSpec:
    """`model` is the module's layer as a model of one; `names` its tensors by role: those of a
    layer, and token_norm, hidden_norm, projection and norm."""

    layout: MTPLayout
    model: ModelSpec
    names: dict[str, str]


def read_mtp(target: ModelSpec, names: Collection[str], module: int = 0) -> MTPSpec:
    """The module among the tensors of the target's checkpoint. ConfigError if there is none, or
    one that this version does not compute."""
    layout = _layout(target, names, module)
    last = target.layers[-1]
    layer = replace(last, attention=replace(last.attention, cache_layer=None), schemes=())
    model = replace(target, layers=(layer,), schemes=())
    if reasons := missing(model):
        raise ConfigError(f"the model's MTP module needs {', '.join(reasons)}, which is not served")
    if layer.attention.latent is not None:
        raise ConfigError("the model's MTP module has latent attention, which is not served")
    if layer.norms != "before":
        raise ConfigError("the MTP module has norms behind its branches, which is not served")
    if not isinstance(layer.feed_forward, DenseSpec):
        raise ConfigError("the model's MTP module has experts; modules without are served")
    stem = _stem(layout, target, module)
    own = {
        "projection": layout.projection,
        "token_norm": layout.token_norm,
        "hidden_norm": layout.hidden_norm,
        "norm": layout.final_norm,
    }
    roles = {role: f"{stem}{name}.weight" for role, name in own.items()}
    for role, name in target.tensor_names.items():
        if "{layer}" in name and "{expert}" not in name:
            roles[role] = stem + name.partition("{layer}.")[2]
    wanted = {roles[role] for role in mtp_shapes(model)}
    if lacking := sorted(wanted.difference(names)):
        raise ConfigError(f"the MTP module lacks {lacking[0]!r}, and {len(lacking) - 1} more")
    return MTPSpec(layout, model, roles)


def mtp_tensors(target: ModelSpec, names: Collection[str]) -> Iterator[str]:
    """Those of MTP modules, of all that there are, whether a module is asked for or not."""
    for layout in LAYOUTS:
        for module in count():
            stem = _stem(layout, target, module)
            if f"{stem}{layout.projection}.weight" not in names:
                break
            yield from (name for name in names if name.startswith(stem))


def _layout(target: ModelSpec, names: Collection[str], module: int) -> MTPLayout:
    for layout in LAYOUTS:
        if f"{_stem(layout, target, module)}{layout.projection}.weight" in names:
            return layout
    if _GATED in names:
        raise ConfigError(
            "the model's MTP module has gated attention and norms around one, as Qwen3-Next has; "
            "this version does not compute them: draft by ngram, suffix or a draft model"
        )
    raise ConfigError(
        f"the checkpoint has no MTP module {module}; draft by ngram, suffix or a draft model"
    )


def _stem(layout: MTPLayout, target: ModelSpec, module: int) -> str:
    begin = target.num_layers if layout.counts_layers else 0
    return layout.stem.format(module=begin + module)


def mtp_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Role -> shape of what a module has; biases of q, k and v where the model's have some."""
    layer, width = model.layers[0], model.hidden_size
    attention, inner = layer.attention, layer.feed_forward
    size = inner.intermediate_size
    queries, keys = (
        heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads)
    )
    shapes: dict[str, tuple[int, ...]] = {
        "projection": (width, 2 * width),
        "q": (queries, width),
        "k": (keys, width),
        "v": (keys, width),
        "o": (width, queries),
        "gate": (size, width),
        "up": (size, width),
        "down": (width, size),
    }
    norms = ("token_norm", "hidden_norm", "norm", "input_norm", "pre_feed_forward_norm")
    shapes |= dict.fromkeys(norms, (width,))
    if attention.qkv_bias:
        shapes |= {f"{role}_bias": (shapes[role][0],) for role in "qkv"}
    if attention.out_bias:
        shapes["o_bias"] = (width,)
    if attention.qk_norm:
        shapes |= {f"{role}_norm": (attention.head_dim,) for role in "qk"}
    return shapes
