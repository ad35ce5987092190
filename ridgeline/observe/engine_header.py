"""What was one life of an engine made of, said so that another program can price it again?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from ridgeline.architectures import read_spec
from ridgeline.cost.constants import Calibration
from ridgeline.cost.hardware import device_from_json, device_to_json
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.errors import ConfigError
from ridgeline.scheduler.scheduler import Scheduler

VERSION = 1
AtLeastOne = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHeader:
    """What one life of an engine was made of; `num_blocks` are those of each of its `pools`.
    `setup` is what pricing needs to know (the model's configuration, device, formats), as plain
    JSON values; empty when it was not known."""

    num_blocks: AtLeastOne
    block_size: AtLeastOne
    windows: tuple[int | None, ...]
    max_num_batched_tokens: AtLeastOne
    max_num_seqs: AtLeastOne
    policy: str
    ttft_slo_s: float | None = None  # what policy slo promises
    tpot_slo_s: float | None = None
    max_in_flight: AtLeastOne
    prefix_caching: bool
    num_drafts: int = 0
    speculate: str = "off"  # who drafts, as on the command line
    draft_config: Mapping[str, Any] = field(default_factory=dict)  # of the model that does
    starvation_limit: int
    max_preemptions: int
    max_num_mixed_tokens: int | None = None
    stages: AtLeastOne = 1  # of its pipeline
    pools: AtLeastOne = 1  # of blocks, on devices that attend for rows of their own
    computes_in_submit: bool = False  # the executor is done with a step when it has taken it
    threads: int = 0  # that compute, of a CPU; 0: not known
    model: str = ""
    setup: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION


def header_of(scheduler: Scheduler, **others: Any) -> EngineHeader:
    """The header for an engine with this scheduler; `others` are the fields that it does not
    know."""
    blocks = scheduler.blocks
    return EngineHeader(
        num_blocks=blocks.pools[0].num_blocks,
        block_size=blocks.block_size,
        windows=tuple(blocks.windows),
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        prefix_caching=blocks.prefix_caching,
        num_drafts=scheduler.num_drafts,
        starvation_limit=scheduler.waiting.starvation_limit,
        max_preemptions=scheduler.state.max_preemptions,
        max_num_mixed_tokens=scheduler.max_num_mixed_tokens,
        stages=scheduler.stages,
        pools=len(blocks.pools),
        **{name: value for name, value in others.items() if value is not None},
    )


def setup_record(setup: Setup, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Plain JSON values; `model_config` is the model's config.json, which its spec was read from.
    The constants are written out even where they are assumed: they may change some day."""
    return {
        "model_config": dict(model_config),
        "device": device_to_json(setup.device),
        "layout": asdict(setup.layout) | {"starts": list(setup.layout.starts)},
        "precision": asdict(setup.precision),
        "calibration": setup.constants.to_json(),
    }


def read_setup(record: Mapping[str, Any]) -> Setup:
    """The inverse of `setup_record`. Raises ConfigError."""
    try:
        config, device = record["model_config"], record["device"]
        shape = dict(record["layout"])
        layout = Layout(**shape | {"starts": tuple(shape.get("starts", ()))})
        precision = Precision(**record["precision"])
        calibration = record["calibration"]
        for part in (config, device, calibration):
            if not isinstance(part, Mapping):
                raise TypeError(f"{part!r:.40} is no object")
    except (KeyError, TypeError) as problem:
        raise ConfigError(
            f"the record does not say what was priced: {problem!r}; it was written by an engine "
            "that could not price its steps"
        ) from None
    return Setup(
        read_spec(config),
        device_from_json(device, "device of the record"),
        layout,
        precision,
        Calibration.from_json(calibration, "calibration of the record"),
    )
