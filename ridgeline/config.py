"""What may a user ask for? (`resolve.py` turns it into what is done.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated

import msgspec

from ridgeline.declared import check_fields, says
from ridgeline.errors import ConfigError
from ridgeline.formats import (
    ATTENTION_BACKENDS,
    COLLECTIVES,
    KV_FORMATS,
    LAUNCHERS,
    POLICIES,
    WEIGHT_FORMATS,
    LauncherLine,
    Names,
)

DEFAULT_POLICY = "fcfs"

Count = Annotated[int, says(ge=1)]
Milliseconds = Annotated[float, says(gt=0)]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. "auto" and None mean: decide, and say so at start.

    Sizes are in tokens, requests or bytes as their names say. A field that is added here is a
    keyword of `LLM`, a flag of each command that starts an engine, a key of the server's file of
    settings and a row of docs/configuration.md; `check_numbers` holds its type and bounds.
    """

    model: Annotated[str, says("a folder or a hub id user/name[@revision]")]
    tokenizer: Annotated[
        str | None, says("folder of the tokenizer, where it is not the model's own", metavar="DIR")
    ] = None
    device: Annotated[str, says("auto, cpu, cuda or cuda:N", is_common=True)] = "auto"
    dtype: Annotated[
        str,
        says(
            "number format of weights, cache and arithmetic; auto takes the checkpoint's own "
            "(float32 for float16 checkpoints on a CPU)",
            choices=("auto", "float32", "bfloat16", "float16"),
            is_common=True,
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        says(
            "auto reads *.safetensors; random draws weights from --seed, for trying speed",
            choices=("auto", "safetensors", "random"),
        ),
    ] = "auto"
    implementation: Annotated[
        str,
        says(
            "whose code computes the layers: native is ours; transformers runs the modules of that "
            "package with our cache, scheduling and sampling, 4 to 40 times slower on a GPU; auto "
            "is native where the family is served, else transformers if it is installed",
            choices=("auto", "native", "transformers"),
        ),
    ] = "auto"
    seed: Annotated[int, says("seed of random weights and of unseeded requests")] = 0
    max_model_len: (
        Annotated[
            Count,
            says(
                "longest prompt plus answer, in tokens; smaller leaves room for more requests",
                is_common=True,
            ),
        ]
        | None
    ) = None
    block_size: Annotated[Count, says("tokens in one block of the KV cache")] = 16
    num_blocks: (
        Annotated[Count, says("blocks of the KV cache, instead of a memory size")] | None
    ) = None
    kv_cache_memory_bytes: (
        Annotated[
            Count, says("memory of the KV cache, such as 512MiB or 4GB; beats --memory-utilization")
        ]
        | None
    ) = None
    memory_utilization: Annotated[
        float,
        says(
            "share of the device's memory for weights, cache and working space",
            gt=0,
            le=1,
            is_common=True,
        ),
    ] = 0.9
    max_num_seqs: (
        Annotated[
            Count, says("most requests that run at the same time; auto by device", is_common=True)
        ]
        | None
    ) = None
    max_num_batched_tokens: (
        Annotated[
            Count,
            says(
                "most tokens computed in one step; smaller steps disturb running answers less, "
                "larger ones read prompts faster"
            ),
        ]
        | None
    ) = None
    max_num_mixed_tokens: (
        Annotated[
            Count,
            says(
                "most tokens of a step in which prompts join answers that go on, more where many "
                "prompts wait: smaller makes answers steadier and first tokens later; when not "
                "given, on a GPU about as few as are read at nine tenths of the full rate, on a "
                "CPU no bound"
            ),
        ]
        | None
    ) = None
    prefix_caching: Annotated[
        bool, says("reuse the cache of a prompt's beginning that was seen before")
    ] = True
    policy: Annotated[
        str | None,
        says(
            "which waiting request comes next; slo promises times and refuses to break them; "
            "fair shares the engine among API keys, or addresses where there are none; when not "
            "given, fair in a server with several keys, else fcfs",
            choices=POLICIES,
        ),
    ] = None
    ttft_slo_ms: (
        Annotated[
            Milliseconds,
            says("with --policy slo: milliseconds within which the first token is promised"),
        ]
        | None
    ) = None
    tpot_slo_ms: (
        Annotated[
            Milliseconds,
            says("with --policy slo: milliseconds promised per later token, on average"),
        ]
        | None
    ) = None
    max_in_flight: Annotated[
        int,
        says(
            "2 plans the next step while one runs, 1 waits for each step's result", choices=(1, 2)
        ),
    ] = 2
    enforce_eager: Annotated[
        bool, says("launch the kernels of a decode step one by one, not as a captured CUDA graph")
    ] = False
    warm_up: Annotated[
        str,
        says(
            "auto captures the steps that can be foreseen before the first request, on a GPU: "
            "seconds, at most 90 where kernels must be compiled; off leaves it to whoever is first",
            choices=("auto", "off"),
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        says(
            "the same tokens whatever else is served: no kernel is chosen or cut by what else is "
            "in a step; slower, CUDA only"
        ),
    ] = False
    speculate: Annotated[  # METHOD[:ARGUMENT][:K], of formats.DRAFT_METHODS
        str,
        says(
            "draft the next tokens and verify all of them in one step: the same answers, sooner "
            "while few are served. auto: the draft of a bundled model; off; ngram and suffix: what "
            "followed the same words before; draft:MODEL: a smaller model with the same tokens; "
            "eagle3:FOLDER: an EAGLE-3 head of the model; mtp: the model's own MTP module; "
            "early:N: the model's own first N layers. A number at the end (ngram:4) fixes how many "
            "are drafted, else as many as pay",
            is_common=True,
        ),
    ] = "auto"
    attention_backend: Annotated[
        str, says("the kernels of attention", choices=Names(ATTENTION_BACKENDS, "auto"))
    ] = "auto"
    weight_format: Annotated[
        str,
        says(
            "how weights are kept in memory; auto keeps the checkpoint's numbers",
            choices=Names(WEIGHT_FORMATS, "auto"),
            is_common=True,
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        says(
            "how cached keys and values are kept; auto is the dtype of the arithmetic",
            choices=Names(KV_FORMATS),
            is_common=True,
        ),
    ] = "auto"
    pack_cache: Annotated[
        str,
        says(
            "on a CPU, weights in the order of the kernels are kept on disk, so that the next "
            "start is quick; clear removes those of all models first",
            choices=("auto", "off", "clear"),
        ),
    ] = "auto"
    threads: (
        Annotated[
            Count,
            says(
                "CPU threads for arithmetic, of each rank; when not given, one for each 16 MiB of "
                "weights, at most all cores",
                is_common=True,
            ),
        ]
        | None
    ) = None
    tp: Annotated[
        Count,
        says(
            "ranks (processes, one for each device) that share every layer of the model",
            is_common=True,
        ),
    ] = 1
    pp: Annotated[
        Count,
        says(
            "stages of a pipeline, each with some layers of the model; each stage has tp ranks",
        ),
    ] = 1
    ep: Annotated[
        Count,
        says(
            "groups of the tp x dp ranks that divide the experts of a layer, each expert whole in "
            "one; 1: each expert is divided like any other matrix",
        ),
    ] = 1
    dp: Annotated[
        Count,
        says(
            "groups of tp ranks, each with a cache and requests of its own, that take every step "
            "together and divide the experts among all; for models with experts",
        ),
    ] = 1
    expert_placement: Annotated[
        str,
        says(
            "which experts a group of ranks has, with --ep: fixed: so many in a row; load: experts "
            "change ranks between steps where a more even load is worth the bytes that move",
            choices=("fixed", "load"),
        ),
    ] = "fixed"
    launcher: Annotated[
        str,
        says(
            "who starts the other ranks: local does it on this machine; join waits for `ridgeline "
            "worker --join` wherever they are; ray places them on a Ray cluster, or on one that it "
            "starts here; auto is local",
            choices=Names(LAUNCHERS, "auto"),
        ),
    ] = "auto"
    join_address: Annotated[
        str | None,
        says(
            "with --launcher join: HOST:PORT where this machine waits for the other ranks, "
            "by an address that they reach",
            metavar="HOST:PORT",
        ),
    ] = None
    collective: Annotated[
        str,
        says("how ranks add up what each has computed", choices=Names(COLLECTIVES, "auto")),
    ] = "auto"
    calibration: Annotated[
        str | None,
        says(
            "file of constants measured by ridgeline calibrate, instead of those kept for this "
            "device; what steps should cost is worked out from them",
            metavar="FILE",
        ),
    ] = None
    event_log: Annotated[
        str | None,
        says(
            "append every event of the engine to this file, for `ridgeline explain` and for "
            "replays: token ids of prompts and answers are in it, their text is not",
            metavar="FILE",
        ),
    ] = None

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def launcher_line(self) -> LauncherLine:
        return LAUNCHERS["local" if self.launcher == "auto" else self.launcher]


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the start-up report: what was asked, what was done and why."""

    field: str
    asked: str
    got: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What is done. Every field has its final value; `decisions` says why."""

    model_path: str
    model_name: str
    revision: str | None
    device: str
    dtype: str
    load_format: str
    seed: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    policy: str
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    max_in_flight: int
    max_num_mixed_tokens: int | None = None  # None: prompts may fill a step that also decodes
    warm_up: bool = False
    max_captured_rows: int = 0  # requests of the largest captured decode step; 0: none is captured
    max_captured_tokens: int = 0  # of the largest captured step with prompts
    deterministic: bool = False
    draft_method: str | None = None  # None: nothing is drafted
    draft_argument: str = ""  # MODEL, N or RATE of the method
    max_draft_tokens: int = 0  # of one request in one step
    num_draft_tokens: int | None = None  # always so many where there is room; None: as many as pay
    max_verified_tokens: int = 0  # of a step with drafts: of each request one token and its drafts
    attention_backend: str
    weight_format: str
    kv_cache_dtype: str
    threads: int  # of each rank
    tp: int = 1
    ep: int = 1
    dp: int = 1
    stages: tuple[tuple[int, int], ...] = ()  # of a pipeline: its first layer, and the one behind
    collective: str = ""
    decisions: tuple[Decision, ...] = ()


def without_drafts(resolved: ResolvedConfig) -> ResolvedConfig:
    """The same for an engine in which nothing is drafted."""
    return replace(
        resolved,
        draft_method=None,
        draft_argument="",
        max_draft_tokens=0,
        num_draft_tokens=None,
        max_verified_tokens=0,
    )


def make_config(options: Mapping[str, object]) -> EngineConfig:
    """ConfigError for an option that there is not, with the nearest one."""
    known = EngineConfig.__struct_fields__
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
            raise ConfigError(f"there is no option {name}{hint}")
    return EngineConfig(**options)  # type: ignore[arg-type]


def check_device(name: str) -> None:
    """ConfigError for what can name no device on any machine."""
    kind, separator, index = name.partition(":")
    if name not in ("auto", "cpu") and (kind != "cuda" or (separator and not index.isdecimal())):
        raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")


def check_numbers(config: EngineConfig) -> None:
    """What can be said of the settings without a model or a device; ConfigError names the first
    that is wrong."""
    check_fields(config)
    if config.num_blocks is not None and config.kv_cache_memory_bytes is not None:
        raise ConfigError("give num_blocks or kv_cache_memory_bytes, not both")
