"""What is asked of a plan, and which hardware, formats and limits could answer it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf

from ridgeline.architectures.spec import DenseSpec, ModelSpec, missing
from ridgeline.cost.captured import as_served
from ridgeline.cost.constants import Calibration
from ridgeline.cost.hardware import Device, Price
from ridgeline.cost.pipeline import with_cuts
from ridgeline.cost.setup import ONE_DEVICE, PLAIN, Layout, Precision, Setup
from ridgeline.errors import ConfigError
from ridgeline.formats import COLLECTIVES

ATTAINMENT = 0.95  # share of requests that must get what was promised
MAX_LOAD = 0.8  # of saturation: the tail of waiting times grows as 1 / (1 - load)
SPREAD = 0.5  # lengths vary by so much around their mean
LENGTH_STEP = 256  # max_model_len is a multiple of it


@dataclass(frozen=True, slots=True)
class Offer:
    """A device that may be used. `price` per hour, None: unknown. Without a calibration its
    efficiency is assumed."""

    device: Device
    price: Price | None
    calibration: Calibration | None = None

    @property
    def per_hour(self) -> float | None:
        return None if self.price is None else self.price.mid


def offer(device: Device, dollars: float | None = None, record: Calibration | None = None) -> Offer:
    """At the catalogue's price, or at one that the person typed."""
    if dollars is None:
        return Offer(device, device.rent, record)
    if not 0 <= dollars < inf:
        raise ConfigError(f"the price of {device.name} is {dollars:g}; it must be 0 or more")
    return Offer(device, Price(dollars, dollars, dollars, "user", "typed", ""), record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`rate` requests a second of `num_input` and `num_output` tokens on average; each is promised
    a first token within `ttft_s` and the others at a mean distance of `tpot_s`. `budget` is dollars
    an hour for everything. `include_unserved`: also what this version cannot serve yet."""

    model: str
    spec: ModelSpec
    rate: float
    num_input: int
    num_output: int
    ttft_s: float
    tpot_s: float
    offers: tuple[Offer, ...]
    budget: float | None = None
    include_unserved: bool = False

    def __post_init__(self) -> None:
        for name in ("rate", "num_input", "num_output", "ttft_s", "tpot_s"):
            value = getattr(self, name)
            if not 0 < value < inf:
                raise ConfigError(f"{name} is {value:g}; it must be above 0")
        if self.budget is not None and not self.budget > 0:
            raise ConfigError(f"a budget of {self.budget:g} dollars an hour buys nothing")
        if not self.offers:
            raise ConfigError("there is no device to choose from")
        longest = self.spec.max_position_embeddings
        if self.num_input + self.num_output > longest:
            raise ConfigError(
                f"{self.num_input} + {self.num_output} tokens are more than the model's context of "
                f"{longest}"
            )

    @property
    def spread(self) -> float:
        """Lengths vary by this share around their means, as far as the model's context allows."""
        room = self.spec.max_position_embeddings / (self.num_input + self.num_output) - 1
        return min(SPREAD, room)

    @property
    def max_model_len(self) -> int:
        """The longest request that is planned for, in tokens."""
        longest = (1 + self.spread) * (self.num_input + self.num_output)
        whole = LENGTH_STEP * ceil(longest / LENGTH_STEP)
        return min(whole, self.spec.max_position_embeddings)


def rate_of_users(users: float, think_s: float, e2e_s: float) -> float:
    """Requests a second of people who ask again `think_s` after each answer (Little's law), when
    answers come as late as promised. A server that carries this rate keeps the promise: were it
    slower than promised, fewer requests would come."""
    if not users > 0 or think_s < 0:
        raise ConfigError("there must be users, who think for 0 or more seconds")
    return users / (think_s + e2e_s)


NODE = 8  # devices of a node where no link says how many


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that are tried."""

    token_budgets: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    batch_limits: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    weights: tuple[str, ...] = ("plain", "fp8", "int8", "int4")
    kv: tuple[str, ...] = ("auto", "fp8")
    tp: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = (1, 2)
    dp: tuple[int, ...] = (1, 2, 4, 8)  # of models with experts alone
    drafts: tuple[int, ...] = (3,)


GRID = Grid()


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica: a device, how many of it, in which formats, with how many drafts a step.
    `model_needs`: what the model needs and this version lacks, on any device."""

    offer: Offer
    layout: Layout = ONE_DEVICE
    precision: Precision = PLAIN
    num_drafts: int = 0
    model_needs: tuple[str, ...] = ()

    @property
    def device(self) -> Device:
        return self.offer.device

    @property
    def text(self) -> str:
        """For people: "h100-sxm x2 (tp 2), fp8 weights"."""
        count = f" x{self.layout.devices}" if self.layout.devices > 1 else ""
        how = f" ({self.layout.text})" if self.layout.devices > 1 else ""
        weights, kv = self.precision.names
        parts = [f"{self.device.name}{count}{how}", f"{weights} weights"]
        if self.precision.kv != "auto":
            parts.append(f"{kv} KV cache")
        if self.num_drafts:
            parts.append(f"{self.num_drafts} drafts")
        return ", ".join(parts)

    @property
    def why_not_served(self) -> str:
        """What of it this version cannot do; "" when it can all."""
        reasons = [f"a model that needs {', '.join(self.model_needs)}"] if self.model_needs else []
        if self.device.kind not in ("gpu", "cpu") or self._is_other_gpu:
            reasons.append(f"{self.device.kind} devices of {self.device.vendor}")
        reasons += [words for words, is_needed in self._beyond_one_device() if is_needed]
        if not self.precision.fast_on(*self.device.traits):
            reasons.append("weights or KV cache of so few bits, at this speed")
        if self.num_drafts:
            reasons.append("a draft head of one layer, which nobody has trained")
        return ", ".join(reasons)

    def _beyond_one_device(self) -> Iterator[tuple[str, bool]]:
        """What this version lacks for one replica on several devices, and whether it needs it."""
        layout, on_gpu = self.layout, self.device.kind == "gpu"
        is_fast = "nccl" in COLLECTIVES
        yield "one replica on several GPUs", layout.tp > 1 and on_gpu and not is_fast
        yield "a pipeline of GPUs", layout.pp > 1 and on_gpu
        yield "groups of GPUs that attend for themselves", layout.dp > 1 and on_gpu

    @property
    def _is_other_gpu(self) -> bool:
        return self.device.kind == "gpu" and self.device.vendor.lower() != "nvidia"

    def setup(self, spec: ModelSpec) -> Setup:
        """Raises ConfigError where the model cannot be spread like that."""
        constants = as_served(
            self.offer.calibration, spec, self.device, self.precision, self.layout
        )
        return with_cuts(Setup(spec, self.device, self.layout, self.precision, constants))


@dataclass(frozen=True, slots=True)
class Candidate:
    """`max_num_seqs` and `max_num_batched_tokens` are the engine's."""

    hardware: Hardware
    max_num_seqs: int
    max_num_batched_tokens: int


def hardware_of(question: Question, grid: Grid = GRID) -> Iterator[Hardware]:
    """Everything that could be one replica, without regard to whether the model fits."""
    needs = missing(question.spec)
    for offer in question.offers:
        spread = [one for one in layouts(question.spec, offer.device, grid) if one.devices > 1]
        for precision in precisions(question.spec, offer.device):
            for layout in (ONE_DEVICE, *spread):
                hardware = Hardware(offer, layout, precision, model_needs=needs)
                if question.include_unserved or layout == ONE_DEVICE or not hardware.why_not_served:
                    yield hardware
        if question.include_unserved:
            for hardware in _other_formats(question.spec, offer, grid):
                yield replace(hardware, model_needs=needs)


def precisions(spec: ModelSpec, device: Device) -> Sequence[Precision]:
    """In which dtypes this version would serve it there: the checkpoint's own, and 16 bits."""
    if device.kind == "cpu":
        own = "bfloat16" if spec.dtype == "bfloat16" else "float32"
        return (Precision(own),)
    if spec.dtype == "float32":
        return (Precision("float32"), Precision("bfloat16"))
    return (Precision(spec.dtype),)


def _other_formats(spec: ModelSpec, offer: Offer, grid: Grid) -> Iterator[Hardware]:
    """Those that are not served: plans keep the numbers of the checkpoint."""
    own = precisions(spec, offer.device)
    formats = [Precision(own[-1].dtype, weights, kv) for weights in grid.weights for kv in grid.kv]
    for layout in layouts(spec, offer.device, grid):
        for precision in formats:
            hardware = Hardware(offer, layout, precision)
            if precision not in own and hardware.why_not_served:
                yield hardware


def layouts(spec: ModelSpec, device: Device, grid: Grid = GRID) -> Iterator[Layout]:
    """Ways to spread one replica. Stages only across full nodes: they save no time per token.
    Groups that attend for themselves are of one node."""
    node = device.link.max_devices if device.link is not None else NODE
    has_experts = any(not isinstance(layer.feed_forward, DenseSpec) for layer in spec.layers)
    for tp, pp, dp in product(grid.tp, grid.pp, grid.dp if has_experts else (1,)):
        if tp * dp > node or (pp > 1 and (dp > 1 or tp < min(node, max(grid.tp)))):
            continue
        for ep in dict.fromkeys((1, tp * dp if has_experts else 1)):
            layout = Layout(tp, pp, ep, dp=dp)
            if _can_spread(spec, layout):
                yield layout


def _can_spread(spec: ModelSpec, layout: Layout) -> bool:
    try:
        layout.check(spec)
    except ConfigError:
        return False
    return True
