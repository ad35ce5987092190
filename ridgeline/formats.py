"""How many bits does a weight or a cached token take, who drafts tokens, who attends, who comes
next, and which class does the work? Data only: cost, planner and resolve read these lines without
loading torch.

A line whose `where` is empty can be priced and planned for, and is not served by this version.
`fast_on` names the kinds of device, or the generations (`Device.traits`), that have kernels for the
packed numbers; elsewhere they are unpacked first, which saves memory and no time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WeightFormatLine:
    """`bits` a weight, None for those of the serving dtype; `group` neighbours in each of
    `group_rows` rows share a scale (and a zero point) of `scale_bytes` (group 0: no such scales),
    and a row of the matrix has `row_bytes` more. `where` is "module:name" of what makes
    a WeightFormat.
    `vocabulary` names the format of embedding and output matrix beside such layers, one that can
    look up rows; its rows are filled up with zeros to a multiple of its `row_step`. `compute` is
    the dtype of the products, as hardware catalogues call it, where the inputs are rounded too;
    None: the weights become the serving dtype first. `cpu_compute`: the same of the kernels of
    CPUs, None where they do as all do. `groups_experts`: a GPU multiplies by all experts of a step
    without the host. `is_fused`: where a GPU has tuned kernels for a model's
    products, those of this format take norms, gates and sums in as well. `chain`: of the time that
    a sum over k takes by itself, so much is left, as a load brings more weights."""

    where: str
    fast_on: tuple[str, ...] = ("all",)
    bits: int | None = None
    group: int = 0
    scale_bytes: int = 0
    compute: str | None = None
    row_bytes: int = 0
    vocabulary: str = "plain"
    row_step: int = 1
    cpu_compute: str | None = None
    group_rows: int = 1
    is_fused: bool = False
    chain: float = 1.0
    groups_experts: bool = False

    def bits_per_weight(self, dtype_bytes: int) -> float:
        """Bits of one weight and its part of the groups' scales, served in a dtype of
        `dtype_bytes`; what rows add (under a thousandth in large models) is not in it."""
        bits = dtype_bytes * 8 if self.bits is None else self.bits
        shared = self.group * self.group_rows
        return bits + (8 * self.scale_bytes / shared if shared else 0.0)


@dataclass(frozen=True, slots=True)
class KVFormatLine:
    """`element_bits` of one K or V number, None for those of the serving dtype; `head_bytes` are
    added per token, KV head and side (scales). `where` is "module:Class" of a KVFormat.
    `takes_latent`: it keeps the vectors of latent attention too."""

    where: str
    fast_on: tuple[str, ...] = ("all",)
    element_bits: int | None = None
    head_bytes: int = 0
    takes_latent: bool = False

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
        """Bytes of K and V of one token in one layer, served in a dtype of `dtype_bytes`."""
        bits = dtype_bytes * 8 if self.element_bits is None else self.element_bits
        return 2 * num_kv_heads * (-(-head_dim * bits // 8) + self.head_bytes)

    def latent_bytes_per_token(self, width: int, dtype_bytes: int) -> int:
        """Bytes of one token's latent vector of `width` numbers in one layer, for all heads."""
        bits = dtype_bytes * 8 if self.element_bits is None else self.element_bits
        return -(-width * bits // 8) + self.head_bytes


@dataclass(frozen=True, slots=True)
class LauncherLine:
    """Who starts the ranks of a group. `where` is "module:function" of what makes the driver's
    Ranks of an EngineConfig; `is_here`: all of them are on this machine."""

    where: str
    is_here: bool = False


# Decodes of an 8B shape on an H200 say so; 4 bits take as long to unpack as they save in loads.
CHAIN_OF_BYTES = 0.5


def _int4(
    where: str, group: int, scale_bytes: int, vocabulary: str = "int8", *, is_fused: bool = False
) -> WeightFormatLine:
    return WeightFormatLine(
        f"ridgeline.quantization.integers:{where}",
        ("cpu", "hopper"),
        bits=4,
        group=group,
        scale_bytes=scale_bytes,
        vocabulary=vocabulary,
        row_step=16,
        cpu_compute="int8",
        is_fused=is_fused,
        groups_experts=True,
    )


CHECKPOINT = "checkpoint"  # of a checkpoint that somebody has quantized: as it is
WEIGHT_FORMATS: dict[str, WeightFormatLine] = {
    "plain": WeightFormatLine(
        "ridgeline.quantization.plain:PlainWeights", is_fused=True, groups_experts=True
    ),
    # Bits and scales are those of each matrix in the checkpoint: `architectures.scheme_config`.
    CHECKPOINT: WeightFormatLine(
        "ridgeline.quantization.checkpoint_weights:CheckpointWeights",
        ("cpu", "hopper"),
        groups_experts=True,
    ),
    "fp8": WeightFormatLine(
        "ridgeline.quantization.fp8:Fp8Weights",
        ("gpu",),
        bits=8,
        compute="fp8",
        row_bytes=4,
        vocabulary="int8",
        is_fused=True,
        chain=CHAIN_OF_BYTES,
        groups_experts=True,
    ),
    "fp8-tensor": WeightFormatLine(
        "ridgeline.quantization.fp8:Fp8TensorWeights",
        ("gpu",),
        bits=8,
        compute="fp8",
        row_bytes=4,
        groups_experts=True,
    ),
    "fp8-block": WeightFormatLine(
        "ridgeline.quantization.fp8:Fp8BlockWeights",
        ("gpu",),
        bits=8,
        group=128,
        scale_bytes=4,
        group_rows=128,
        groups_experts=True,
    ),
    "int8": WeightFormatLine(
        "ridgeline.quantization.integers:int8",
        ("cpu", "hopper"),
        bits=8,
        compute="int8",
        row_bytes=4,
        vocabulary="int8",
        row_step=16,
        cpu_compute="int8",
        is_fused=True,
        chain=CHAIN_OF_BYTES,
        groups_experts=True,
    ),
    "int8-outliers": WeightFormatLine(
        "ridgeline.quantization.int8_outliers:Int8OutlierWeights",
        ("cpu", "hopper"),
        bits=8,
        row_bytes=4,
        vocabulary="int8",
        cpu_compute="int8",
    ),
    "int4": _int4("int4", 128, 2, is_fused=True),
    "int4-all": _int4("int4_all", 128, 2, vocabulary="int4-g32"),
    "int4-g64": _int4("int4_g64", 64, 2),
    "int4-g32": _int4("int4_g32", 32, 2),
    "int4-asym": _int4("int4_asym", 128, 3),
    "int4-g64-asym": _int4("int4_g64_asym", 64, 3),
    "int4-g32-asym": _int4("int4_g32_asym", 32, 3),
}
POLICIES = {
    "fair": "ridgeline.scheduler.policies.fair:Fair",
    "fcfs": "ridgeline.scheduler.policies.fcfs:FCFS",
    "priority": "ridgeline.scheduler.policies.priority:Priority",
    "slo": "ridgeline.scheduler.policies.slo:SLO",
}
ATTENTION_BACKENDS: dict[str, str] = {
    "reference": "ridgeline.attention.reference:ReferenceAttention",
    "sdpa": "ridgeline.attention.sdpa:SdpaAttention",
    "triton": "ridgeline.attention.paged:PagedAttention",
    "native": "ridgeline.attention.native:NativeAttention",
    "latent": "ridgeline.attention.latent:TorchLatentAttention",
    "latent_cpu": "ridgeline.attention.latent:HostLatentAttention",
    "latent_triton": "ridgeline.attention.latent_paged:PagedLatentAttention",
    "flashinfer": "ridgeline.attention.flashinfer:FlashInferAttention",
    "flash_attention": "ridgeline.attention.flash_attention:FlashAttention",
}
COLLECTIVES: dict[str, str] = {
    "gloo": "ridgeline.distributed.gloo:Gloo",
    "shared": "ridgeline.distributed.shared_memory:SharedMemory",
    "nccl": "ridgeline.distributed.nccl:Nccl",
    "peer": "ridgeline.distributed.peer:Peer",
}
LAUNCHERS: dict[str, LauncherLine] = {
    "local": LauncherLine("ridgeline.distributed.launch_local:launch", is_here=True),
    "join": LauncherLine("ridgeline.build_ranks:let_join"),
    "ray": LauncherLine("ridgeline.distributed.launch_ray:launch"),
}
KV_FORMATS: dict[str, KVFormatLine] = {
    "auto": KVFormatLine("ridgeline.kvcache.formats:PlainKV", takes_latent=True),
    "fp8": KVFormatLine("ridgeline.kvcache.formats:Fp8KV", element_bits=8, takes_latent=True),
    "int8": KVFormatLine(
        "ridgeline.kvcache.formats:Int8KV", element_bits=8, head_bytes=2, takes_latent=True
    ),
    "int4": KVFormatLine("ridgeline.kvcache.formats:Int4KV", element_bits=4, head_bytes=4),
}


@dataclass(frozen=True, slots=True)
class DraftMethodLine:
    """`where` is "module:Class" of a DraftMethod. `argument` says what stands behind the name, as
    in draft:MODEL ("": nothing). `acceptance` is taken for the chance of a draft, if all before it
    were right, until some were checked. `looks_ahead`: drafts are looked up in a row's own tokens
    and cost no pass of a model, so that what was found is measured even while nothing is checked.
    `has_cache`: it keeps keys and values of its own, which miss what it was not asked about.
    `is_served` is False for what only measures the engine: its tokens are no model's. `is_head`: it
    drafts from the hidden states of the model that verifies."""

    where: str
    argument: str
    acceptance: float
    text: str
    looks_ahead: bool = False
    is_served: bool = True
    has_cache: bool = False
    is_head: bool = False


MODEL, LAYERS, RATE, FOLDER = "MODEL", "N", "RATE", "FOLDER"  # kinds of arguments
DRAFT_METHODS: dict[str, DraftMethodLine] = {
    "ngram": DraftMethodLine(
        "ridgeline.speculation.prompt_lookup:NGram",
        "",
        0.4,
        "what followed the same words before",
        True,
    ),
    "suffix": DraftMethodLine(
        "ridgeline.speculation.prompt_lookup:Suffix",
        "",
        0.4,
        "what followed the longest repeated passage",
        True,
    ),
    "early": DraftMethodLine(
        "ridgeline.speculation.draft_model:EarlyLayers",
        LAYERS,
        0.7,
        "what the model's own first layers say",
    ),
    "draft": DraftMethodLine(
        "ridgeline.speculation.draft_model:DraftModel",
        MODEL,
        0.7,
        "what a smaller model says",
        has_cache=True,
    ),
    "eagle3": DraftMethodLine(
        "ridgeline.speculation.eagle3:Eagle3Head",
        FOLDER,
        0.7,
        "what an EAGLE-3 head says of the model's hidden states",
        is_head=True,
    ),
    "mtp": DraftMethodLine(
        "ridgeline.speculation.mtp:MTPHead",
        "",
        0.7,
        "what the model's own MTP module says of its hidden states",
        is_head=True,
    ),
    "synthetic": DraftMethodLine(
        "ridgeline.speculation.synthetic:Synthetic",
        RATE,
        0.7,
        "drafts that are right so often, whatever they are",
        is_served=False,
    ),
}
# Tokens of steps with prompts that are captured, each filled up to the next of them. On an H200 a
# step of an 8B model takes longer with 448 tokens than with 512.
TOKEN_BUCKETS = (
    *(8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512),
    *(640, 768, 896, 1024, 1280, 1536, 1792, 2048),
    *(2560, 3072, 4096, 5120, 6144, 8192),  # of small models
)
MAX_DRAFT_TOKENS = 16  # of one row in one step
# Of steps that check some. Few, as each is captured by itself for each size of a batch; what lies
# between loses a percent.
STEP_DRAFTS = (1, 2, 3, 4, 6, 8, 12, MAX_DRAFT_TOKENS)
# At most, where they are as many as pay. On a CPU a step of up to 7 tokens in bfloat16 says bit for
# bit what each of them alone does, so that no answer depends on how many are drafted.
AUTO_DRAFT_TOKENS = {"gpu": 8, "cpu": 6}


@dataclass(frozen=True, slots=True)
class AskedDrafts:
    """`ngram:4` taken apart. `num_draft_tokens` None: as many as pay."""

    method: str
    argument: str = ""
    num_draft_tokens: int | None = None

    @property
    def line(self) -> DraftMethodLine:
        return DRAFT_METHODS[self.method]

    @property
    def text(self) -> str:
        """As it is asked for."""
        number = None if self.num_draft_tokens is None else str(self.num_draft_tokens)
        return ":".join(filter(None, (self.method, self.argument, number)))


def read_speculate(text: str) -> AskedDrafts | None:
    """What METHOD[:ARGUMENT][:K] asks for, None for off; "auto" has to be decided before.
    ConfigError says what is wrong and what there is."""
    name, _, rest = text.partition(":")
    if text == "off":
        return None
    if name in ("auto", "off"):
        raise ConfigError(f"speculate {text!r}: {name} takes no number; write {name}")
    if name not in DRAFT_METHODS:
        raise ConfigError(f"unknown speculate {text!r}; choose {_draft_choices()}")
    wanted = DRAFT_METHODS[name].argument
    argument, _, number = rest.rpartition(":") if wanted else ("", "", rest)
    if wanted and not (argument and number.isdecimal()):
        argument, number = rest, ""
    if "" in text.split(":") or (wanted and not argument):
        missing = wanted if wanted and argument[:1] in ("", ":") else "a number of drafts"
        raise ConfigError(f"speculate {text!r} lacks {missing}; write {_draft_form(name)}")
    _check_argument(wanted, argument, text)
    if not number:
        return AskedDrafts(name, argument)
    if not number.isdecimal() or not 1 <= int(number) <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"speculate {text!r}: the number of drafts must be 1 .. {MAX_DRAFT_TOKENS}, not "
            f"{number!r}; write {_draft_form(name)}, or leave it out to draft as many as pay"
        )
    return AskedDrafts(name, argument, int(number))


def _check_argument(wanted: str, argument: str, text: str) -> None:
    if wanted == LAYERS and not (argument.isdecimal() and int(argument) >= 1):
        raise ConfigError(
            f"speculate {text!r}: {argument!r} is no number of layers from 1 on; write "
            f"{_draft_form('early')}"
        )
    if wanted == RATE:
        try:
            rate = float(argument)
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1:
            raise ConfigError(f"speculate {text!r}: a rate lies in 0 .. 1, not {argument!r}")


def _draft_form(name: str) -> str:
    wanted = DRAFT_METHODS[name].argument
    return f"{name}:{wanted}[:K]" if wanted else f"{name}[:K]"


def _draft_choices() -> str:
    served = (name for name, line in DRAFT_METHODS.items() if line.is_served)
    return ", ".join(("auto", "off", *map(_draft_form, served)))


class Names(Collection[str]):
    """What a setting may be: `more`, and the lines of a table that are served, as it is when
    somebody asks."""

    def __init__(self, table: Mapping[str, Any], *more: str) -> None:
        self._table, self._more = table, more

    def __contains__(self, name: object) -> bool:
        return any(name == one for one in self)

    def __iter__(self) -> Iterator[str]:
        yield from self._more
        yield from (name for name, line in self._table.items() if getattr(line, "where", line))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def served(lines: Mapping[str, WeightFormatLine] | Mapping[str, KVFormatLine]) -> dict[str, str]:
    """Name -> "module:Class" of the formats that this version can serve."""
    return {name: line.where for name, line in lines.items() if line.where}


def check_served(
    lines: Mapping[str, WeightFormatLine] | Mapping[str, KVFormatLine], name: str, what: str
) -> None:
    """ConfigError if `name` is a format that is only priced, or none at all."""
    choices = ", ".join(served(lines))
    if name not in lines:
        raise ConfigError(f"unknown {what} {name!r}; choose one of {choices}")
    if not lines[name].where:
        raise ConfigError(
            f"{what} {name!r} can be planned for, cannot be served by this version; "
            f"choose one of {choices}"
        )


def weight_line(name: str) -> WeightFormatLine:
    """The line of a weight format; ConfigError lists the choices."""
    if name not in WEIGHT_FORMATS:
        known = ", ".join(WEIGHT_FORMATS)
        raise ConfigError(f"unknown weight format {name!r}; choose one of {known}")
    return WEIGHT_FORMATS[name]


def kv_line(name: str) -> KVFormatLine:
    """The line of a KV format; ConfigError lists the choices."""
    if name not in KV_FORMATS:
        raise ConfigError(f"unknown KV format {name!r}; choose one of {', '.join(KV_FORMATS)}")
    return KV_FORMATS[name]
