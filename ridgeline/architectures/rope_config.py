"""Which rotary positions does this config.json ask for? Both generations of keys.

Older files have `rope_theta` beside `rope_scaling` (with `type` or `rope_type`), newer ones have
all of it in `rope_parameters`. Where both are given, `rope_scaling` wins, as in Transformers.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_POSITIONS, ConfigReader
from ridgeline.architectures.spec import RopeSpec
from ridgeline.errors import ConfigError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
SHARE = "partial_rotary_factor"
POSITION_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def read_rope(
    config: ConfigReader,
    *,
    head_dim: int,
    default_theta: float,
    max_positions: int,
    rotated_share: float | None = None,
) -> RopeSpec:
    """The RopeSpec of a config whose context is `max_positions` tokens. `rotated_share`: of a head,
    if the config does not say; None: all of it, and it may not say otherwise."""
    if head_dim % 2:
        raise config.fail("head_dim", f"is {head_dim}; rotary positions need an even one")
    scaling = config.section("rope_scaling") or config.section("rope_parameters")
    if rotated_share is None:
        config.refuse(SHARE, 1, 1.0)
        if scaling is not None:
            scaling.refuse(SHARE, 1, 1.0)
        return _read(config, scaling, head_dim, default_theta, max_positions)
    holder = scaling if scaling is not None and scaling.has(SHARE) else config
    share = holder.number(SHARE, default=rotated_share, low=0.0, high=1.0)
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        reason = f"is {share:g}; it makes {rotated} of a head's {head_dim} numbers rotate, an odd"
        raise holder.fail(SHARE, f"{reason} number or none")
    rope = _read(config, scaling, rotated, default_theta, max_positions)
    return rope if rotated == head_dim else replace(rope, rotary_dim=rotated)


def _read(
    config: ConfigReader,
    scaling: ConfigReader | None,
    head_dim: int,
    default_theta: float,
    max_positions: int,
) -> RopeSpec:
    outer_theta = config.number("rope_theta", default=default_theta, low=1.0, high=1e15)
    if scaling is None:
        return RopeSpec(theta=outer_theta)
    theta = scaling.number("rope_theta", default=outer_theta, low=1.0, high=1e15)
    kind = _kind(scaling)
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "dynamic" and head_dim <= 2:
        raise config.fail("head_dim", f"is {head_dim}; dynamic positions need more than 2")
    if kind in ("linear", "dynamic"):
        # Both take the config's own length as the one the model was trained for.
        return RopeSpec(
            theta=theta, kind=kind, factor=_factor(scaling), original_max_position=max_positions
        )
    original = _original(config, scaling, max_positions)
    if kind == "llama3":
        return _llama3(scaling, theta, original)
    if kind == "longrope":
        return _longrope(scaling, theta, original, max_positions, head_dim // 2)
    return _yarn(scaling, theta, original, max_positions)


def read_two_ropes(
    config: ConfigReader, *, head_dim: int, thetas: tuple[float, float], max_positions: int
) -> tuple[RopeSpec, RopeSpec]:
    """Of layers that see everything and of those that look back on a window, where they differ.
    Newer files have one section for each; the keys of older ones speak of the former alone."""
    newer = config.section("rope_parameters") or ConfigReader({}, config.path, config.source)
    sections = [newer.section(kind) for kind in ("full_attention", "sliding_attention")]
    if newer.values and not any(sections):
        raise config.fail("rope_parameters", "must have a section for each of the layer types")
    older = {key: config.values[key] for key in POSITION_KEYS[:2] if config.has(key)}
    found = []
    for section, theta, keys in zip(sections, thetas, (older, {}), strict=True):
        said = {"rope_parameters": section.values} if section else keys
        one = ConfigReader(said, config.path, config.source)
        found.append(
            read_rope(one, head_dim=head_dim, default_theta=theta, max_positions=max_positions)
        )
    return found[0], found[1]


def _kind(scaling: ConfigReader) -> str:
    key = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.text(key, default="default")
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        nested = [name for name in scaling.values if name.endswith("_attention")]
        if nested:
            raise scaling.fail(nested[0], "differs by layer type, which is not supported")
        raise scaling.fail(key, f"is {kind[:60]!r}; supported are {known}")
    if kind == "default" and (nested := [n for n in scaling.values if n.endswith("_attention")]):
        raise scaling.fail(nested[0], "differs by layer type, which is not supported")
    return kind


def _factor(scaling: ConfigReader, default: float | None = None) -> float:
    return scaling.number("factor", default=default, low=1e-3, high=1e6)


def _original(config: ConfigReader, scaling: ConfigReader, max_positions: int) -> int:
    # A top-level value wins over the nested one (Transformers, for Phi-3 style files).
    source = config if config.has("original_max_position_embeddings") else scaling
    return source.integer(
        "original_max_position_embeddings", high=MAX_POSITIONS, default=max_positions
    )


def _llama3(scaling: ConfigReader, theta: float, original: int) -> RopeSpec:
    low = scaling.number("low_freq_factor", default=None, low=1e-6, high=1e6)
    high = scaling.number("high_freq_factor", default=None, low=1e-6, high=1e6)
    if high <= low:
        raise scaling.fail("high_freq_factor", f"is {high:g}; it must be above {low:g}")
    return RopeSpec(
        theta=theta,
        kind="llama3",
        factor=_factor(scaling),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _longrope(
    scaling: ConfigReader, theta: float, original: int, max_positions: int, num_factors: int
) -> RopeSpec:
    for key in ("short_mscale", "long_mscale"):
        scaling.refuse(key)
    factor = _factor(scaling, default=max_positions / original)
    given = "attention_factor"
    return RopeSpec(
        theta=theta,
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=scaling.number(given, default=None, low=0.0, high=1e6)
        if scaling.has(given)
        else None,
        short_factors=scaling.numbers("short_factor", length=num_factors, low=1e-6, high=1e9),
        long_factors=scaling.numbers("long_factor", length=num_factors, low=1e-6, high=1e9),
    )


def longrope_growth(factor: float, trained: int) -> float:
    """What LongRoPE multiplies cosines and sines by where a context of `trained` tokens has grown
    by `factor` (arXiv 2402.13753, as Phi-3 has it)."""
    if factor <= 1.0 or trained <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(trained))


def _yarn(scaling: ConfigReader, theta: float, original: int, max_positions: int) -> RopeSpec:
    def optional(key: str) -> float | None:
        if not scaling.has(key):
            return None
        return scaling.number(key, default=None, low=0.0, high=1e6)

    if theta <= 1.0:
        raise scaling.fail("rope_theta", "must be above 1 for yarn")
    beta_fast = optional("beta_fast") or 32.0
    beta_slow = optional("beta_slow") or 1.0
    if beta_fast < beta_slow:
        raise scaling.fail("beta_fast", f"is {beta_fast:g}, below beta_slow ({beta_slow:g})")
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=_factor(scaling, default=max_positions / original),
        original_max_position=original,
        attention_factor=optional("attention_factor"),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=scaling.flag("truncate", default=True),
    )


def yarn_growth(factor: float, mscale: float) -> float:
    """What YaRN multiplies by where a context has grown by `factor` (arXiv 2309.00071, section
    3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longest_context(rope: RopeSpec, max_positions: int) -> int:
    """Tokens that these positions can serve: the scaled kinds reach past the trained length."""
    if rope.kind in ("linear", "dynamic"):
        return max(max_positions, int(max_positions * rope.factor))
    if rope.kind == "yarn" and rope.original_max_position is not None:
        return max(max_positions, int(rope.original_max_position * rope.factor))
    return max_positions


def check_context(rope: RopeSpec, max_positions: int, max_model_len: int | None) -> None:
    """ConfigError when the asked length lies past what the positions can serve."""
    limit = longest_context(rope, max_positions)
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise ConfigError(
            f"max_model_len is {max_model_len}; this model serves 1 to {limit} tokens"
            f" (max_position_embeddings {max_positions}, rope type {rope.kind})"
        )
