"""What is priced: which model, on which devices, spread how, in which formats?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.architectures.spec import DenseSpec, LayerSpec, ModelSpec
from ridgeline.cost.constants import Calibration, default_calibration
from ridgeline.cost.hardware import Device
from ridgeline.errors import ConfigError
from ridgeline.formats import KVFormatLine, WeightFormatLine, kv_line, weight_line

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # as hardware catalogues say
LONG = {short: name for name, short in SHORT.items()}
LOGIT_BYTES = 4  # logits are float32 in every format


@dataclass(frozen=True, slots=True)
class Layout:
    """`tp` devices split every layer, `pp` stages split the layers, `replicas` are whole copies.

    `starts` are the first layers of all stages but the first; without them the stages have as many
    layers as each other. `dp` groups of `tp` devices attend for rows of their own and take each
    step together, a wave that lasts as long as its slowest group; the experts are divided among all
    of them.
    `ep` groups of the tp * dp devices divide the experts (1: every expert is split like a dense
    feed-forward); inside such a group an expert is split over tp * dp / ep devices.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    replicas: int = 1
    dp: int = 1
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "dp", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.expert_devices % self.ep:
            among = f"tp ({self.tp})" if self.dp == 1 else f"tp x dp ({self.expert_devices})"
            raise ConfigError(f"ep is {self.ep}; it must divide {among}")
        if self.starts and len(self.starts) != self.pp - 1:
            raise ConfigError(f"pp is {self.pp}, and stages begin at 0 and {self.starts}")

    def stage_layers(self, num_layers: int, stage: int) -> range:
        """Which layers of a model a stage has."""
        if not self.starts:
            return range(stage * num_layers // self.pp, (stage + 1) * num_layers // self.pp)
        bounds = (0, *self.starts, num_layers)
        return range(bounds[stage], bounds[stage + 1])

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp * self.dp

    @property
    def expert_devices(self) -> int:
        """Devices of a stage, among which the experts are divided."""
        return self.tp * self.dp

    @property
    def all_devices(self) -> int:
        return self.devices * self.replicas

    @property
    def text(self) -> str:
        """As the command line says it: "tp 4, pp 2", or "1 device"."""
        parts = [f"{name} {getattr(self, name)}" for name in ("tp", "pp", "ep", "dp", "replicas")]
        return ", ".join(part for part in parts if not part.endswith(" 1")) or "1 device"

    def check(self, spec: ModelSpec) -> None:
        """ConfigError if this model has fewer of something than there are ranks to divide it."""
        if self.pp > spec.num_layers:
            raise ConfigError(f"pp is {self.pp}; the model has only {spec.num_layers} layers")
        has_experts = any(not isinstance(one.feed_forward, DenseSpec) for one in spec.layers)
        for name in ("ep", "dp"):
            if getattr(self, name) > 1 and not has_experts:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; this model has no experts to divide"
                )
        for layer in dict.fromkeys(spec.layers):
            self._check_layer(layer)

    def _check_layer(self, layer: LayerSpec) -> None:
        inner = layer.feed_forward
        self._divides("tp", self.tp, layer.attention.num_heads, "attention heads")
        if isinstance(inner, DenseSpec):
            self._divides("tp", self.tp, inner.intermediate_size, "rows of the feed-forward")
            return
        self._divides("ep", self.ep, inner.num_experts, "experts")
        self._divides(
            "tp", self.expert_devices // self.ep, inner.intermediate_size, "rows of an expert"
        )

    def _divides(self, name: str, size: int, total: int, what: str) -> None:
        if total < size:
            raise ConfigError(
                f"{name} is {getattr(self, name)}; {total} {what} cannot be divided among {size}"
                f" ranks, use at most {total}"
            )


ONE_DEVICE = Layout()


@dataclass(frozen=True, slots=True)
class Precision:
    """`dtype` is that of activations and of weights that no format packs; `weights` and `kv` are
    names of `ridgeline.formats`."""

    dtype: str = "bfloat16"
    weights: str = "plain"
    kv: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(SHORT)}")
        weight_line(self.weights)
        kv_line(self.kv)

    @classmethod
    def named(cls, weights: str = "bf16", kv: str = "auto", *, dtype: str = "bf16") -> Precision:
        """From the words of the command line: bf16, fp16, fp32, fp8, int8 or int4.

        16- and 32-bit names of weights set the dtype of the arithmetic, the others keep `dtype`.
        The cache is in that dtype too ("auto" or its name) or in a format of its own.
        """
        serving = LONG.get(weights) or LONG.get(dtype, dtype)
        same = ("auto", SHORT.get(serving, ""))
        if kv in LONG and kv not in same and DTYPE_BYTES[LONG[kv]] != DTYPE_BYTES.get(serving):
            raise ConfigError(
                f"KV format {kv!r} with {SHORT.get(serving, serving)} arithmetic: the cache is in "
                "the same dtype or in fp8, int8 or int4"
            )
        return cls(serving, "plain" if weights in LONG else weights, "auto" if kv in LONG else kv)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def short_dtype(self) -> str:
        """The dtype as `Device.peak_flops` calls it."""
        return SHORT[self.dtype]

    @property
    def weight_line(self) -> WeightFormatLine:
        return weight_line(self.weights)

    @property
    def kv_line(self) -> KVFormatLine:
        return kv_line(self.kv)

    @property
    def compute_dtype(self) -> str:
        """In which dtype packed matrices are multiplied, as `Device.peak_flops` calls it."""
        return self.weight_line.compute or self.short_dtype

    @property
    def weight_bits(self) -> float:
        """Bits of one packed weight and its part of the scales."""
        return self.weight_line.bits_per_weight(self.dtype_bytes)

    @property
    def vocabulary(self) -> Precision:
        """Of the products with the output matrix, and of look-ups in the embedding."""
        return replace(self, weights=self.weight_line.vocabulary)

    @property
    def served_today(self) -> bool:
        """This version can serve it; otherwise it can only be priced and planned for."""
        return bool(self.weight_line.where and self.kv_line.where)

    def fast_on(self, *traits: str) -> bool:
        """This version serves it on devices of these `Device.traits` by kernels that read the
        packed numbers, as prices take for granted."""
        if self.dtype == "float32":  # kernels made for a generation multiply 16 bits
            traits = tuple(one for one in traits if one != "hopper")
        lines = (self.weight_line, self.kv_line)
        return self.served_today and all({*traits, "all"} & set(line.fast_on) for line in lines)

    @property
    def names(self) -> tuple[str, str]:
        """(weights, kv) in the words of the command line; `named` understands them."""
        weights = self.short_dtype if self.weights == "plain" else self.weights
        return weights, self.short_dtype if self.kv == "auto" else self.kv


PLAIN = Precision()


@dataclass(frozen=True, slots=True)
class Setup:
    """Raises ConfigError when the model cannot be spread like that. Without a calibration the
    constants are assumed."""

    spec: ModelSpec
    device: Device
    layout: Layout = ONE_DEVICE
    precision: Precision = PLAIN
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        self.layout.check(self.spec)

    @property
    def constants(self) -> Calibration:
        return self.calibration or default_calibration(self.device)
