"""Which steps does an engine capture, so that all their kernels are launched at once?

`ridgeline.resolve` decides that for an engine. Whoever prices steps of an engine that does not run
supposes one with its defaults (`as_served`): a calibration says what a launch costs, and not how
many there are.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from ridgeline.architectures.counts import linear_flops_per_token
from ridgeline.architectures.spec import NATIVE, ExpertsSpec, ModelSpec
from ridgeline.cost.constants import Calibration
from ridgeline.cost.hardware import Device
from ridgeline.cost.setup import ONE_DEVICE, Layout, Precision, Setup
from ridgeline.formats import TOKEN_BUCKETS, WeightFormatLine
from ridgeline.step import StepPricer

SHARE = 0.9  # of the best rate at which prompts are read
ROUNDING = 8  # tokens

MAX_ROWS = {"gpu": 512, "cpu": 64}  # of decodes; of a CPU's larger steps the calls are a small part
# Tokens of a step that checks drafts: more take as long per token as prompts do, and gain nothing.
MAX_VERIFIED_TOKENS = {"gpu": 512, "cpu": 64}
# A host may take a millisecond to send off the kernels of a layer, which a GPU computes with for so
# many tokens, if the model is small. Longer steps of large ones are the work of the GPU.
MAX_TOKENS, LEAST_TOKENS = 8192, 2048
FLOPS_BEHIND_LAUNCHES = 5e11  # of the matrices of a layer, in that millisecond
# Of experts that the native kernels of a CPU know.
CPU_GATES, CPU_PANEL = ("silu", "clamped"), 16
RECORDED_KV = ("auto", "int8")  # for which all of a decode step on a CPU is done by native kernels


def can_capture(
    spec: ModelSpec,
    kind: str,
    weights: WeightFormatLine,
    dtype: str = "bfloat16",
    *,
    deterministic: bool = False,
) -> bool:
    """Not where the host must know which experts a step needs: in weight formats without grouped
    products, and on a CPU for experts that its kernels do not know; nor where the layers are
    another library's."""
    if spec.implementation != NATIVE:
        return False
    layers = [layer.feed_forward for layer in spec.layers]
    experts = [one for one in layers if isinstance(one, ExpertsSpec)]
    if not experts or kind != "cpu":
        return not experts or weights.groups_experts
    is_known = all(
        one.activation in CPU_GATES and one.intermediate_size % CPU_PANEL == 0 for one in experts
    )
    return weights.groups_experts and is_known and dtype == "bfloat16" and not deterministic


def most_prompt_tokens(spec: ModelSpec) -> int:
    """Of the largest step with prompts that a GPU's engine captures; 0: those of latent attention
    are not."""
    if any(layer.attention.latent is not None for layer in spec.layers):
        return 0
    layer_flops = linear_flops_per_token(spec) / spec.num_layers
    busy = int(FLOPS_BEHIND_LAUNCHES / layer_flops)
    return min(max(busy, LEAST_TOKENS), MAX_TOKENS)


def captured_chunk(least: int, most: int) -> int:
    """Of the sizes of up to `most` tokens that steps with prompts are captured in, the one that is
    nearest to `least`; without any, `least`."""
    sizes = [size for size in TOKEN_BUCKETS if size <= most]
    return min(sizes, key=lambda size: abs(size - least), default=least)


def captured_size(num_tokens: int, most: int) -> int:
    """The size, of those of up to `most` tokens, in which a step with prompts and so many tokens is
    captured; where none is large enough, its own."""
    place = bisect_left(TOKEN_BUCKETS, num_tokens)
    if place == len(TOKEN_BUCKETS) or TOKEN_BUCKETS[place] > most:
        return num_tokens
    return TOKEN_BUCKETS[place]


def as_served(
    calibration: Calibration | None,
    spec: ModelSpec,
    device: Device,
    precision: Precision,
    layout: Layout = ONE_DEVICE,
) -> Calibration | None:
    """The calibration with the captured steps of an engine that serves this model with its
    defaults; None, which stands for assumed constants, stays so. Stages and groups of devices that
    attend for themselves capture none."""
    if calibration is None:
        return None
    rows = tokens = 0
    is_parted = layout.pp > 1 or layout.dp > 1
    if can_capture(spec, device.kind, precision.weight_line) and not is_parted:
        if device.kind != "cpu":
            rows, tokens = MAX_ROWS["gpu"], most_prompt_tokens(spec)
        elif precision.dtype == "bfloat16" and precision.kv in RECORDED_KV:
            rows = MAX_ROWS["cpu"]
    host = replace(calibration.host, captured_tokens=rows, captured_prompt_tokens=tokens)
    return replace(calibration, host=host)


def efficient_chunk(pricer: StepPricer, most: int, share: float = SHARE) -> int:
    """The fewest tokens that a step reads at `share` of the best rate (tokens a second) of any step
    of up to `most` tokens, rounded up; at most `most`.

    A step takes a while however little it computes, so that rates rise with its length at first;
    from here on longer steps gain little and only keep those waiting who are being answered.
    """

    def rate(num_tokens: int) -> float:
        return num_tokens / pricer.seconds(((num_tokens, 0),))

    sizes = sorted({n for i in range(14) for n in (2**i, 3 * 2**i) if n <= most} | {most})
    rates = [rate(n) for n in sizes]
    wanted = share * max(rates)
    end = next(i for i, found in enumerate(rates) if found >= wanted)
    between = range(sizes[end - 1] if end else 1, sizes[end] + 1)
    least = between[bisect_left(between, x=True, key=lambda n: rate(n) >= wanted)]
    return min(most, -(-least // ROUNDING) * ROUNDING)


def mixed_tokens(setup: Setup, pricer: StepPricer, most: int) -> int | None:
    """What an engine with steps of up to `most` tokens bounds those by in which prompts join
    decodes, unless it is told: the size of a captured step nearest to an efficient one. None: it
    bounds none, as on a CPU."""
    if setup.device.kind == "cpu":
        return None
    captures = can_capture(setup.spec, setup.device.kind, setup.precision.weight_line)
    largest = most_prompt_tokens(setup.spec) if captures else 0
    return captured_chunk(efficient_chunk(pricer, most), largest)
