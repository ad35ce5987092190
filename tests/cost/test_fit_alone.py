"""Does the fit see through a slow host what the device does in the steps of small models?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from ridgeline.architectures import read_spec
from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.constants import (
    AttentionConstants,
    Calibration,
    HostConstants,
    MatmulConstants,
    StreamConstants,
    default_calibration,
)
from ridgeline.cost.execution_mode import Footprint
from ridgeline.cost.fit import ALONE, Fit, Point, fit, predict
from ridgeline.cost.hardware import find_device
from ridgeline.cost.ops import Op, step_ops
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import PLAIN, Setup
from ridgeline.cost.step_features import attention_kinds, step_features
from ridgeline.speculation.price import DraftSteps, first_layers
from ridgeline.step import StepShape

DEVICE = find_device("h200-sxm")
SEEN = HostConstants(1e-5, 1e-6)  # of the host by itself


def model(width: int, layers: int, inner: int, vocabulary: int) -> ModelSpec:
    return read_spec(
        {
            "model_type": "llama",
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 64,
            "num_key_value_heads": width // 64,
            "intermediate_size": inner,
            "vocab_size": vocabulary,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
    )


LARGE, SMALL, LEAST = (
    model(2048, 28, 5632, 64000),
    model(768, 8, 2048, 32000),
    model(256, 2, 768, 4096),
)
UNSEEN, ITS_DRAFT = model(384, 6, 1152, 4096), model(192, 2, 384, 4096)

TRUTH = replace(
    default_calibration(DEVICE),
    origin="calibrated",
    matmul={"bf16": MatmulConstants(0.8, 0.85, 4.6e-6, q=2.5, k0=20.0, e_v=0.95, k_m=10.0)},
    attention={"bf16": AttentionConstants(0.85, 4e-6, 0.55, 0.4, 7e-6, verify_token=0.12)},
    streams={
        f"{name} bf16": StreamConstants(share, seconds)
        for name, share, seconds in (
            ("norm", 0.9, 1.2e-6),
            ("rope_and_cache", 0.9, 1.6e-6),
            ("activation", 0.9, 1.1e-6),
            ("embedding", 0.9, 2.4e-6),
            ("sampling", 0.5, 4.5e-6),
            ("final_norm", 0.9, 1.2e-6),
        )
    },
    host=HostConstants(
        4e-4, 2e-6, 7e-6, captured_tokens=512, captured_prompt_tokens=2048,
        captured_t0=0.8, captured_s=1.4e-5, pass_s=5e-6, warm_t0=0.6, check_request_s=3e-6,
    ),
)  # fmt: skip


def decodes(rows: int, context: int) -> StepShape:
    return ((1, context),) * rows


def operators() -> Iterator[Point]:
    for spec in (LARGE, SMALL):
        for tokens in (1, 4, 16, 64, 256, 1024):
            for op in step_ops(spec, decodes(tokens, 0)):
                if not op.kind.endswith("attention") and op.name != "final_norm":
                    one = (replace(op, count=1),)
                    label = f"{op.name} {op.k} {tokens}"
                    yield Point(op.kind, "bf16", one, 0.0, label=label)
    shapes: dict[str, list[StepShape]] = {
        "decode_attention": [decodes(b, s) for b in (1, 8, 64) for s in (200, 1000, 8000)],
        "prefill_attention": [((n, b),) for n in (64, 512, 4096) for b in (0, 4096)],
    }
    for what, many in shapes.items():
        for number, shape in enumerate(many):
            ops = tuple(replace(op, count=1) for op in step_ops(LARGE, shape) if op.kind == what)
            yield Point(what, "bf16", ops, 0.0, label=f"{what} {number}")


def drafted(spec: ModelSpec, rows: int, context: int, num_draft_tokens: int) -> tuple[Op, ...]:
    """A check, and the passes of the first layer before it."""
    check = step_ops(
        spec, ((num_draft_tokens + 1, context),) * rows, num_logits=rows * (num_draft_tokens + 1)
    )
    one = step_ops(first_layers(spec, 1), decodes(rows, context))
    return check + tuple(replace(op, count=op.count * num_draft_tokens) for op in one)


def warm(spec: ModelSpec, shape: StepShape) -> float:
    features = step_features(tuple(attention_kinds(spec)), shape)
    return Footprint.of(spec, PLAIN).warm(features, DEVICE.l2_bytes)


def steps() -> Iterator[Point]:
    for number, spec in enumerate((LARGE, SMALL, LEAST)):
        for rows, context in ((1, 200), (4, 300), (16, 500), (64, 200), (160, 300)):
            shape, label = decodes(rows, context), f"{number}: {rows} {context}"
            what = Point("", "bf16", step_ops(spec, shape), 0.0, None, label, captured=True)
            what = replace(what, warm=warm(spec, shape))
            yield replace(what, what="decode_step", num_requests=rows)
            yield replace(what, what="decode_device")
        for rows, context, k in ((1, 200, 1), (1, 300, 4), (1, 200, 7), (16, 300, 3), (64, 200, 2)):
            ops, label = drafted(spec, rows, context, k), f"{number}: {rows} {context}, {k}"
            what = Point("draft_device", "bf16", ops, 0.0, None, label, captured=True, num_passes=k)
            yield replace(what, warm=warm(spec, ((k + 1, context),) * rows))
        for rows, context, k in ((1, 200, 1), (16, 300, 1), (64, 200, 2), (128, 200, 1)):
            shape, label = ((k + 1, context),) * rows, f"{number}: {rows} {context}, {k}"
            ops = step_ops(spec, shape, num_logits=rows * (k + 1))
            what = Point("check_step", "bf16", ops, 0.0, rows, label, captured=True)
            yield replace(what, warm=warm(spec, shape))


def measured(rng: Random) -> list[Point]:
    return [
        replace(point, seconds=predict(point, DEVICE, TRUTH) * math.exp(rng.gauss(0, 0.01)))
        for point in (*operators(), *steps())
    ]


def device_seconds(known: Calibration, num_draft_tokens: int) -> float:
    """Of a step of a pair that nobody has measured."""
    host = replace(known.host, captured_tokens=512)
    setup = Setup(UNSEEN, DEVICE, calibration=replace(known, host=host))
    drafts = DraftSteps(Pricer(replace(setup, spec=ITS_DRAFT)), begin=2)
    shape = ((num_draft_tokens + 1, 300),)
    check_s = Pricer(setup).cost(shape, num_draft_tokens + 1).device_s
    return check_s + drafts.seconds(1, 300, num_draft_tokens)


def errors(found: Fit) -> list[float]:
    return [
        abs(device_seconds(found.calibration, k) / device_seconds(TRUTH, k) - 1)
        for k in (0, 1, 2, 4, 6)
    ]


@pytest.mark.parametrize("seed", range(2))
def test_what_the_device_does_is_found_behind_a_slow_host(seed: int) -> None:
    print(f"seed {seed}")
    seen = measured(Random(seed))
    hidden = [p for p in seen if p.what == "decode_step" and "0:" not in p.label]
    assert all(p.seconds > 3.5e-4 for p in hidden)  # the host's time, in all steps of small models
    found = fit(seen, DEVICE, SEEN)
    assert max(errors(found)) < 0.06
    host = found.calibration.host
    assert host.captured_t0 == pytest.approx(0.8, rel=0.1)
    assert host.captured_s == pytest.approx(1.4e-5, rel=0.3)
    assert host.warm_t0 == pytest.approx(0.6, rel=0.15)
    assert host.c0_s == pytest.approx(4e-4, rel=0.1)
    assert host.c1_s == pytest.approx(2e-6, rel=0.4)
    assert host.check_request_s == pytest.approx(3e-6, rel=0.3)
    for what in ALONE:
        assert found.errors[f"{what} bf16"].median < 0.04
    blind = fit([p for p in seen if p.what not in ALONE], DEVICE, SEEN)
    assert blind.calibration.host.captured_s == blind.calibration.host.pass_s == 0.0


def test_what_is_beside_the_operators_is_priced_once_a_step_and_once_a_pass() -> None:
    none = replace(TRUTH, host=replace(TRUTH.host, captured_s=0.0, pass_s=0.0))
    for k in (0, 1, 3):
        more = device_seconds(TRUTH, k) - device_seconds(none, k)
        assert more == pytest.approx(1.4e-5 + k * 5e-6)
    setup = Setup(UNSEEN, DEVICE, calibration=TRUTH)
    shape = decodes(3, 100)
    waits = replace(TRUTH, host=replace(TRUTH.host, c0_s=0.0, c1_s=0.0))
    pricer = Pricer(replace(setup, calibration=waits))
    assert pricer.seconds(shape) == pytest.approx(pricer.cost(shape).expected_s)
    assert pricer.decode_run([100] * 3).seconds(0) == pricer.seconds(shape)
    eager = replace(waits, host=replace(waits.host, captured_tokens=0, per_launch_s=0.0))
    bare = replace(eager, host=replace(eager.host, captured_s=0.0))
    one, other = (Pricer(replace(setup, calibration=c)).seconds(shape) for c in (eager, bare))
    assert one == other
    assert Calibration.from_json(TRUTH.to_json()) == TRUTH
