"""How is each rule of thumb derived, one graded step after the other?

Every step asks for a number that functions of the engine know; wrong answers that texts give are
told apart. Nothing is kept: answers and hints stand in the address of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, isclose, isfinite
from typing import Annotated, Literal

import msgspec

from ridgeline.architectures.counts import kv_bytes_per_token, layer_kv_bytes, weight_bytes
from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.communication import one_shot_s, wire
from ridgeline.cost.hardware import Device, find_device
from ridgeline.cost.memory import ideal_sequences
from ridgeline.errors import RequestFault
from ridgeline.figures import number
from ridgeline.lab.machine import Device as DeviceName
from ridgeline.lab.machine import Model, spec_of
from ridgeline.lab.page import Answer, Figure, Page, Preset, Question, Table, control
from ridgeline.speculation.price import MAX_DRAFTS, expected_tokens, simple_speedup

BYTES = 2  # of 16-bit weights and caches
FIRST, SECOND = (1.0, 3.0), (2.0, 5.0)  # scores of two tiles
EXAMPLE_DRAFTS, EXAMPLE_BATCH, MOST_DEVICES = 5, 32, 8
COST, DRAFTS = "ridgeline.cost.", "ridgeline.speculation.price."
COUNTS = "ridgeline.architectures.counts."


class Step(msgspec.Struct, frozen=True):
    """`wrong` are answers that texts give, and what is left out in each."""

    ask: str
    unit: str
    value: float
    hints: tuple[str, ...]
    solution: str
    where: str
    wrong: tuple[tuple[float, str], ...] = ()
    tolerance: float = 0.02  # of the value


# fmt: off
class Inputs(msgspec.Struct, frozen=True):
    challenge: Annotated[str, control("derive", choices=(
        "KV per token", "critical batch", "draft length", "online softmax",
        "tensor parallel"))] = "KV per token"
    model: Model = "llama-3-70b"
    device: DeviceName = "h100-sxm"
    context: Annotated[
        int, control("context", "of one request", ge=1, le=131072, step=1, scale="log",
                     unit="tokens")] = 8192
    acceptance: Annotated[
        float, control("acceptance", "of a draft, if all before it were right", ge=0.05, le=0.99,
                       step=0.01)] = 0.8
    draft_cost: Annotated[
        float, control("cost of a draft", "in steps of the model", ge=0.01, le=0.5, step=0.01,
                       unit="steps")] = 0.05
    answers: Annotated[
        str, control("answers", "the challenge, then one answer a step", length=300,
                     is_hidden=True)] = ""
    hints: Annotated[
        str, control("hints", "the challenge, then how many are shown a step", length=100,
                     is_hidden=True)] = ""
# fmt: on


class Graded(msgspec.Struct, frozen=True):
    """As the reader sees it. `solution`: "" until the answer is right or all hints are used."""

    ask: str
    unit: str
    given: float | None
    verdict: Literal["open", "right", "wrong", "well known"]
    says: str
    hints: list[str]
    hints_left: int
    solution: str


class Drawing(msgspec.Struct, frozen=True):
    challenge: str
    steps: list[Graded]
    num_right: int


# ------------------------------------------------------------------------ the challenges


def _kv_per_token(inputs: Inputs, spec: ModelSpec, device: Device) -> Iterator[Step]:
    attention = spec.layers[0].attention
    every_head = 2 * attention.num_heads * attention.head_dim
    own = layer_kv_bytes(attention, BYTES, "auto") / BYTES
    token = kv_bytes_per_token(spec, BYTES)
    request = token * inputs.context
    weights = weight_bytes(spec, BYTES)
    heads, size = attention.num_kv_heads, attention.head_dim
    shared = "as many KV heads as query heads: grouped queries share them"
    yield Step(
        "How many numbers does the first layer keep for one token?", "numbers", own,
        ("A key and a value, each of one head's size, for every KV head.",
         f"This model has {heads} KV heads of {size} numbers"
         + (", but keeps one latent vector for all heads." if attention.latent else ".")),
        f"2 x {heads} x {size}" if attention.latent is None else "latent vector + rotated part",
        COUNTS + "layer_kv_bytes",
        ((every_head, shared), (own / 2, "keys alone; values are kept too")))  # fmt: skip
    yield Step(
        f"How many bytes in all {spec.num_layers} layers, in 16 bits?", "B", token,
        ("Each number takes 2 bytes.", "Times the layers."),
        f"{number(own)} x {BYTES} B x {spec.num_layers}", COUNTS + "kv_bytes_per_token",
        ((token / BYTES, "one byte a number; 16 bits are two"),
         (every_head * BYTES * spec.num_layers, shared)),
    )  # fmt: skip
    yield Step(
        f"How many GB for a request of {inputs.context:,} tokens? (1 GB = 1e9 B)", "GB",
        request / 1e9, ("Bytes of a token times tokens.", "Divide by 1e9, not by 2^30."),
        f"{number(token)} B x {inputs.context} / 1e9", COUNTS + "kv_bytes_per_token",
        ((request / 2**30, "GiB; 1 GiB is 1.074 GB"),
         (every_head * BYTES * spec.num_layers * inputs.context / 1e9, shared)),
    )  # fmt: skip
    yield Step(
        "How many GB do the weights take in 16 bits?", "GB", weights / 1e9,
        ("Parameters times 2 bytes.", f"{number(weights / BYTES / 1e9)} billion parameters."),
        f"{number(weights / BYTES / 1e9)}e9 x {BYTES} B", COUNTS + "weight_bytes",
        ((weights / BYTES / 1e9, "one byte a parameter"),),
    )  # fmt: skip
    yield Step(
        f"How many such requests fit beside them in {number(device.memory_bytes / 1e9)} GB?",
        "requests", ideal_sequences(device.memory_bytes, weights, request),
        ("What the weights leave, over the bytes of a request, rounded down.",
         "If the weights alone are too large, none."),
        f"floor(({number(device.memory_bytes / 1e9)} - {number(weights / 1e9)}) /"
        f" {number(request / 1e9)}), at least 0",
        COST + "memory.ideal_sequences", tolerance=0.0,
    )  # fmt: skip


def _critical_batch(inputs: Inputs, spec: ModelSpec, device: Device) -> Iterator[Step]:
    ridge, critical = device.ridge("bf16"), device.critical_batch("bf16", 8 * BYTES)
    peak, bandwidth = device.peak("bf16"), device.bandwidth
    sparse = "the peak with 2:4 sparsity, twice the dense one that products of weights reach"
    yield Step(
        "How many operations does one weight of 16 bits take part in, for one token?", "operations",
        2, ("It is multiplied by a number, and the product is added.",), "multiply + add",
        COUNTS + "linear_flops_per_token", ((1, "the product alone; it is added too"),),
    )  # fmt: skip
    yield Step(
        f"With {EXAMPLE_BATCH} requests in the step, how many operations for each byte of weights?",
        "FLOP/B", EXAMPLE_BATCH * 2 / BYTES,
        ("All requests use a weight after it was read once.", "A weight has 2 bytes."),
        f"2 x {EXAMPLE_BATCH} / {BYTES} B", COST + "hardware.Device.critical_batch",
        ((EXAMPLE_BATCH * 2, "operations for each weight; a weight has two bytes"),),
    )  # fmt: skip
    yield Step(
        f"At how many FLOP/B is {device.label} in balance?", "FLOP/B", ridge,
        ("The peak over the bandwidth: what can be computed while one byte is read.",
         f"Dense: {number(peak / 1e12)} TFLOP/s; {number(bandwidth / 1e12)} TB/s."),
        f"{number(peak / 1e12)}e12 / {number(bandwidth / 1e12)}e12",
        COST + "hardware.Device.ridge", ((2 * ridge, sparse),),
    )  # fmt: skip
    yield Step(
        "From how many requests on does arithmetic bind products of 16-bit weights?", "requests",
        critical, ("Where the operations for each byte reach the balance.",
                   "2 x B operations for 2 bytes are B for each byte."),
        f"{number(ridge)} FLOP/B x {BYTES} B / 2", COST + "hardware.Device.critical_batch",
        ((2 * critical, sparse), (EXAMPLE_BATCH, f"{EXAMPLE_BATCH} is where texts say it starts;"
          f" it uses {number(100 * EXAMPLE_BATCH / critical)} %")),
    )  # fmt: skip
    yield Step(
        f"What share of the arithmetic can {EXAMPLE_BATCH} requests use at most?", "%",
        min(100.0, 100 * EXAMPLE_BATCH / critical),
        ("Their operations for each byte, over the balance.",),
        f"{EXAMPLE_BATCH} / {number(critical)}", COST + "hardware.Device.critical_batch",
    )  # fmt: skip


def _draft_length(inputs: Inputs, spec: ModelSpec, device: Device) -> Iterator[Step]:
    a, r, k = inputs.acceptance, inputs.draft_cost, EXAMPLE_DRAFTS
    tokens = expected_tokens(a, k)
    found = [simple_speedup(a, n, r) for n in range(MAX_DRAFTS + 1)]
    best = max(range(len(found)), key=lambda n: found[n])
    flat = [n for n in range(len(found)) if found[n] >= 0.95 * found[best]]
    yield Step(
        f"{k} drafts, each right with chance {a:g} if all before it were: how many are accepted, on"
        " average?", "drafts", tokens - 1,
        ("The n-th draft counts only if all n were right: a^n.", "a + a^2 + ... + a^k."),
        f"{a:g} (1 - {a:g}^{k}) / (1 - {a:g})", DRAFTS + "expected_tokens",
        ((k * a, "k times a; but a draft behind a wrong one is lost"),
         (tokens, "with the model's own token; here the drafts alone")),
    )  # fmt: skip
    yield Step(
        "How many tokens come out of the step?", "tokens", tokens,
        ("The model adds one of its own behind the last accepted draft.",), "accepted + 1",
        DRAFTS + "expected_tokens", ((k * a + 1, "k times a, plus one"),),
    )  # fmt: skip
    yield Step(
        f"How many times as fast is that, if a draft costs {r:g} of a step?", "times", found[k],
        ("Tokens of a step over what it takes now.", f"It takes 1 + {k} x {r:g} steps."),
        f"{number(tokens)} / (1 + {k} x {r:g})", DRAFTS + "simple_speedup",
        (((k * a + 1) / (1 + k * r), "k times a drafts accepted; texts print such figures"),
         (tokens, "drafting is not free")),
    )  # fmt: skip
    yield Step(
        "Which number of drafts is the best?", "drafts", best,
        ("Compare k and k + 1: more tokens, but each later draft is rarer.",
         "Try all from 1 to 16."),
        f"the largest of expected tokens / (1 + k x {r:g}), k = 0 to {MAX_DRAFTS}",
        DRAFTS + "simple_speedup", tolerance=0.0,
    )  # fmt: skip
    yield Step(
        "And how many times as fast is it there?", "times", found[best],
        ("The same formula at the best k.",),
        f"{number(expected_tokens(a, best))} / (1 + {best} x {r:g}); within 5 % from k ="
        f" {flat[0]} to {flat[-1]}", DRAFTS + "simple_speedup", tolerance=0.005,
    )  # fmt: skip


def _seen(scores: tuple[float, ...]) -> tuple[float, float]:
    """Largest score, and sum of exp(score - largest), at once: what tiles have to come to."""
    return max(scores), sum(exp(score - max(scores)) for score in scores)


def _online_softmax(inputs: Inputs, spec: ModelSpec, device: Device) -> Iterator[Step]:
    (m1, l1), (m2, l2) = _seen(FIRST), _seen(FIRST + SECOND)
    factor, where = exp(m1 - m2), "ridgeline.lab.pages.derivations._seen"
    (a, b), (c, d) = FIRST, SECOND
    yield Step(
        f"A row of scores comes in two tiles: {a:g}, {b:g} and then {c:g}, {d:g}. After the first,"
        " what is the sum l of exp(score - m), with m their maximum?", "", l1,
        ("m is the larger of the two, so its own term is 1.",),
        f"exp({a:g} - {m1:g}) + exp({b:g} - {m1:g})", where,
        ((exp(a) + exp(b), "without the maximum taken off: large scores overflow"),),
    )  # fmt: skip
    yield Step(
        f"The second tile brings {d:g}. By what are l and the output so far multiplied?", "",
        factor, ("All old terms were exp(score - old m); now they must be exp(score - new m).",),
        f"exp({m1:g} - {m2:g})", where,
        ((exp(m2 - m1), "the other way round: a larger maximum makes old terms smaller"),
         (1, "a common mistake: without the factor old and new terms have different units")),
    )  # fmt: skip
    yield Step(
        "What is l after the second tile?", "", l2,
        ("The old l times the factor, plus the new terms.",),
        f"{number(l1)} x {number(factor)} + exp({c:g} - {m2:g}) + exp({d:g} - {m2:g})", where,
        ((l1 + exp(c - m2) + exp(d - m2), "the old sum was not rescaled"),),
    )  # fmt: skip
    yield Step(
        "What weight does the last score have in the end?", "", exp(d - m2) / l2,
        ("Its term, divided by l.", "Only now, behind the last tile, is anything divided."),
        f"exp({d:g} - {m2:g}) / {number(l2)}", where,
        ((exp(d - m2), "without the division at the end"),),
    )  # fmt: skip


def _tensor_parallel(inputs: Inputs, spec: ModelSpec, device: Device) -> Iterator[Step]:
    n, weights = MOST_DEVICES, weight_bytes(spec, BYTES)
    way, whole = wire(device, n), spec.hidden_size * BYTES
    alone_s, sums = weights / device.bandwidth, 2 * spec.num_layers + 1
    one_s = one_shot_s(whole, n, way.bytes_per_s, way.latency_s)
    bare_s = one_shot_s(whole, n, way.bytes_per_s, 0.0)
    break_even_s = (alone_s - alone_s / n) / sums
    yield Step(
        f"How many ms does one {device.label} take to read the {number(weights / 1e9)} GB of"
        " weights once, for one token?", "ms", alone_s * 1e3,
        ("Bytes over bandwidth.", f"The bandwidth is {number(device.bandwidth / 1e12)} TB/s."),
        f"{number(weights / 1e9)} GB / {number(device.bandwidth / 1e9)} GB/s",
        COST + "hardware.Device.bandwidth",
    )  # fmt: skip
    yield Step(
        f"And {n} of them, each a share?", "ms", alone_s / n * 1e3, (f"An {n}th each.",),
        f"{number(alone_s * 1e3)} ms / {n}", COST + "hardware.Device.bandwidth",
    )  # fmt: skip
    yield Step(
        f"How many sums over devices does a token of {spec.num_layers} layers need?", "sums", sums,
        ("One behind attention and one behind the feed-forward of each layer.",
         "And one behind the embedding, whose rows are shared out too."),
        f"2 x {spec.num_layers} + 1", COST + "ops.layer_ops",
        ((spec.num_layers, "one a layer; there are two: attention and feed-forward"),
         (2 * spec.num_layers, "and one behind the embedding")), tolerance=0.0,
    )  # fmt: skip
    yield Step(
        f"How many us does one take, where each device reads the {number(whole / 1e3)} kB of the"
        f" {n - 1} others at {number(way.bytes_per_s / 1e9)} GB/s after a latency of"
        f" {number(way.latency_s * 1e6)} us?", "us", one_s * 1e6,
        ("Latency plus bytes over the rate.", f"{n - 1} times the bytes."),
        f"{number(way.latency_s * 1e6)} us + {n - 1} x {number(whole / 1e3)} kB /"
        f" {number(way.bytes_per_s / 1e9)} GB/s",
        COST + "communication.one_shot_s",
        ((bare_s * 1e6, "the bytes alone; the latency is most of it"),),
    )  # fmt: skip
    yield Step(
        f"How many times as fast as one are {n} devices, then?", "times",
        alone_s / (alone_s / n + sums * one_s),
        ("One device's time over the share's time with all sums.",),
        f"{number(alone_s * 1e3)} / ({number(alone_s / n * 1e3)} + {sums} x"
        f" {number(one_s * 1e3)}) ms", COST + "communication.one_shot_s",
        ((n, "messages cost nothing"),),
    )  # fmt: skip
    yield Step(
        f"At which time of a sum would {n} devices be no faster than one?", "us",
        break_even_s * 1e6,
        (f"{n} devices save the difference between the whole time and a share.",
         "Divide what is saved by the number of sums."),
        f"({number(alone_s * 1e3)} - {number(alone_s / n * 1e3)}) ms / {sums}",
        COST + "communication.one_shot_s",
    )  # fmt: skip


Challenge = Callable[[Inputs, ModelSpec, Device], Iterator[Step]]
CHALLENGES: dict[str, Challenge] = {
    "KV per token": _kv_per_token,
    "critical batch": _critical_batch,
    "draft length": _draft_length,
    "online softmax": _online_softmax,
    "tensor parallel": _tensor_parallel,
}


# ------------------------------------------------------------------------ grading


def answer(inputs: Inputs) -> Answer[Drawing]:
    device, spec = find_device(inputs.device), spec_of(inputs.model)
    steps = list(CHALLENGES[inputs.challenge](inputs, spec, device))
    given = _read("answers", inputs.answers, inputs.challenge, len(steps))
    shown = _read("hints", inputs.hints, inputs.challenge, len(steps))
    every = zip(steps, given, shown, strict=True)
    graded = [grade(step, one, int(hints or 0)) for step, one, hints in every]
    drawing = Drawing(inputs.challenge, graded, sum(one.verdict == "right" for one in graded))
    told = (step for step, one in zip(steps, graded, strict=True) if one.solution)
    return Answer(
        _sentence(inputs, drawing, steps),
        drawing,
        [Figure(one.ask, one.value, one.unit, "ideal", one.solution, one.where) for one in told],
        [_table(drawing)],
        _questions(inputs),
    )


def _read(name: str, text: str, challenge: str, count: int) -> list[float | None]:
    """Values of the steps of this challenge; those of another do not count."""
    owner, _, rest = text.partition(":")
    if owner != challenge:
        return [None] * count
    found: list[float | None] = []
    for word in rest.split(",")[:count]:
        try:
            value = float(word) if word.strip() else None
        except ValueError:
            value = float("nan")
        if value is not None and not isfinite(value):
            raise RequestFault(f"{name}: {word[:20]!r} is no number; write 12.5", param=name)
        found.append(value)
    return found + [None] * (count - len(found))


def grade(step: Step, given: float | None, num_hints: int) -> Graded:
    """Right within the tolerance, else a well-known mistake where it is one, else wrong."""
    verdict: Literal["open", "right", "wrong", "well known"] = "open"
    says = ""
    if given is not None:
        verdict, says = "wrong", "too large" if given > step.value else "too small"
        for value, words in step.wrong:
            if isclose(given, value, rel_tol=max(step.tolerance, 0.01)):
                verdict, says = "well known", words
        if isclose(given, step.value, rel_tol=step.tolerance, abs_tol=1e-12):
            verdict, says = "right", ""
    hints = list(step.hints[:num_hints])
    is_told = verdict == "right" or num_hints > len(step.hints)
    solution = f"{step.solution} = {number(step.value)} {step.unit}".rstrip() if is_told else ""
    left = 0 if is_told else len(step.hints) + 1 - num_hints
    return Graded(step.ask, step.unit, given, verdict, says, hints, left, solution)


def _sentence(inputs: Inputs, drawing: Drawing, steps: list[Step]) -> str:
    told = f"{inputs.model}, {inputs.device}, {inputs.context:,} tokens"
    if inputs.challenge == "draft length":
        told = f"acceptance {inputs.acceptance:g}, drafts at {inputs.draft_cost:g} of a step"
    said, last = f"{drawing.num_right} of {len(steps)} steps are right", steps[-1]
    if drawing.num_right < len(steps):
        return f"{said}: {drawing.challenge}, {told}."
    return f"{said}: {drawing.challenge}, {told}: {number(last.value)} {last.unit}".rstrip() + "."


def _table(drawing: Drawing) -> Table:
    columns = ["step", "answer", "unit", "is", "solution"]
    rows = [[s.ask, s.given or "-", s.unit, s.verdict, s.solution] for s in drawing.steps]
    return Table(drawing.challenge, columns, rows)


def _questions(inputs: Inputs) -> list[Question]:
    found = [simple_speedup(inputs.acceptance, k, inputs.draft_cost) for k in (2, 5, 8)]
    return [
        Question(
            "Why are some wrong answers known by name?",
            "They are printed in texts: MHA's cache for a model with grouped queries, the peak with"
            " sparsity, k times a accepted drafts, messages without latency.",
        ),
        Question(
            "Does the best number of drafts matter much?",
            f"Less than one fears: with acceptance {inputs.acceptance:g} and drafts at"
            f" {inputs.draft_cost:g} of a step, 2, 5 and 8 drafts give {number(found[0])},"
            f" {number(found[1])} and {number(found[2])} times.",
        ),
    ]


PAGE = Page(
    "derivations",
    "Derive it",
    "Five rules of thumb, step by step, graded by the functions that the engine itself uses.",
    "Prove it",
    Inputs,
    answer,
    presets=tuple(Preset(name, {"challenge": name}) for name in CHALLENGES),
)
