"""What could be deployed? One line of the search: a device, how it is used, and the limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeline.architectures.spec import DenseSpec, ModelSpec, missing
from ridgeline.cost.captured import as_served
from ridgeline.cost.hardware import Device
from ridgeline.cost.layout import ONE_DEVICE, Layout
from ridgeline.cost.precision import PLAIN, Precision
from ridgeline.cost.setup import Setup
from ridgeline.errors import ConfigError
from ridgeline.planner.question import Offer, Question

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
    drafts: tuple[int, ...] = (3,)


GRID = Grid()


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica: a device, how many of it, in which formats, with how many guesses a step.
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
    def words(self) -> str:
        """For people: "h100-sxm x2 (tp 2), fp8 weights"."""
        count = f" x{self.layout.devices}" if self.layout.devices > 1 else ""
        how = f" ({self.layout.words})" if self.layout.devices > 1 else ""
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
        if self.layout.devices > 1:
            reasons.append("one replica on several devices")
        if not self.precision.fast_on(*self.device.words):
            reasons.append("weights or KV cache of so few bits, at this speed")
        if self.num_drafts:
            reasons.append("a draft head of one layer, which nobody has trained")
        return ", ".join(reasons)

    @property
    def _is_other_gpu(self) -> bool:
        return self.device.kind == "gpu" and self.device.vendor.lower() != "nvidia"

    def setup(self, spec: ModelSpec) -> Setup:
        """Raises ConfigError where the model cannot be spread like that."""
        constants = as_served(self.offer.calibration, spec, self.device, self.precision)
        return Setup(spec, self.device, self.layout, self.precision, constants)


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
        for precision in precisions(question.spec, offer.device):
            yield Hardware(offer, ONE_DEVICE, precision, model_needs=needs)
        if question.include_unserved:
            for hardware in _unserved(question.spec, offer, grid):
                yield replace(hardware, model_needs=needs)


def precisions(spec: ModelSpec, device: Device) -> Sequence[Precision]:
    """In which dtypes this version would serve it there: the checkpoint's own, and 16 bits."""
    if device.kind == "cpu":
        own = "bfloat16" if spec.dtype == "bfloat16" else "float32"
        return (Precision(own),)
    if spec.dtype == "float32":
        return (Precision("float32"), Precision("bfloat16"))
    return (Precision(spec.dtype),)


def _unserved(spec: ModelSpec, offer: Offer, grid: Grid) -> Iterator[Hardware]:
    own = precisions(spec, offer.device)[-1]
    formats = [Precision(own.dtype, weights, kv) for weights in grid.weights for kv in grid.kv]
    for layout in layouts(spec, offer.device, grid):
        for precision in formats:
            if layout.devices > 1 or not precision.fast_on(*offer.device.words):
                yield Hardware(offer, layout, precision)


def layouts(spec: ModelSpec, device: Device, grid: Grid = GRID) -> Iterator[Layout]:
    """Ways to spread one replica. Stages only across full nodes: they save no time per token."""
    node = device.link.max_devices if device.link is not None else NODE
    has_experts = any(not isinstance(layer.feed_forward, DenseSpec) for layer in spec.layers)
    for tp in grid.tp:
        for pp in grid.pp:
            for ep in (1, tp) if has_experts and tp > 1 else (1,):
                if tp > node or (pp > 1 and tp < min(node, max(grid.tp))):
                    continue
                layout = Layout(tp, pp, ep)
                if _can_spread(spec, layout):
                    yield layout


def _can_spread(spec: ModelSpec, layout: Layout) -> bool:
    try:
        layout.check(spec)
    except ConfigError:
        return False
    return True
