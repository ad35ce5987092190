"""What does a model's own `generation_config.json` say about how to sample from it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.architectures.config_reader import MAX_IDS
from ridgeline.errors import ConfigError, RequestFault
from ridgeline.request import SamplingParams

MAX_EXACT = 1 << 53  # a float holds every integer up to it


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values for fields that a request leaves out; None where the model has no wish."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    end_token_ids: frozenset[int] = frozenset()

    def asked(self) -> dict[str, Any]:
        """The fields of SamplingParams that the model has a wish for."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def sampling(self, **changes: Any) -> SamplingParams:
        """The model's defaults, overridden by `changes`."""
        return SamplingParams(**(self.asked() | changes))


def generation_defaults(
    generation_config: Mapping[str, Any], fallback_end: tuple[int, ...]
) -> GenerationDefaults:
    """Read a parsed `generation_config.json` ({} when there is none).

    `do_sample: false` means greedy. End tokens come from `eos_token_id` (a number or a list),
    else from `fallback_end`. ConfigError names a field that cannot be used.
    """
    greedy = generation_config.get("do_sample") is False
    values: dict[str, Any] = {"temperature": 0.0} if greedy else {}
    sampled = ("temperature", "top_p", "top_k", "min_p")
    for name in ("repetition_penalty",) if greedy else (*sampled, "repetition_penalty"):
        if generation_config.get(name) is not None:
            values[name] = generation_config[name]
    for name, value in values.items():
        if isinstance(value, int) and abs(value) > MAX_EXACT:
            raise ConfigError(f"generation_config.json: {name} is beyond 2^53, no sensible value")
    end = generation_config.get("eos_token_id")
    ids = fallback_end if end is None else tuple(end) if isinstance(end, list) else (end,)
    if len(ids) > MAX_IDS:
        raise ConfigError(
            f"generation_config.json: eos_token_id has {len(ids)} ids; at most {MAX_IDS} are read"
        )
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(
            f"generation_config.json: eos_token_id {repr(end)[:60]} is not a token id"
        )
    defaults = GenerationDefaults(**values, end_token_ids=frozenset(ids))
    try:
        defaults.sampling()
    except RequestFault as fault:
        raise ConfigError(f"generation_config.json: {fault}") from None
    return defaults
