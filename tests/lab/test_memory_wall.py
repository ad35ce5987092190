"""Do the figures of the memory wall equal those that others worked out by hand?"""

from __future__ import annotations

import pytest

from ridgeline.lab.page import Figure
from ridgeline.lab.pages.memory_wall import Inputs, answer


def figures(inputs: Inputs) -> dict[str, Figure]:
    return {figure.name: figure for figure in answer(inputs).figures}


TEXTBOOK = Inputs(context=1, bandwidth_gb_s=2000.0)  # 70B in 16 bit on an A100 of 312 TFLOP/s


def test_one_request_on_an_a100() -> None:
    """140 GB / 2 TB/s = 70 ms = 14.29 tok/s, 0.45 ms of arithmetic, 99.4 % waiting. The model has
    70.55e9 weights, of which the embedding is not read, so a percent is allowed."""
    found = figures(TEXTBOOK)
    assert found["at best"].value == pytest.approx(14.29, rel=0.01)
    assert found["time of memory"].value == pytest.approx(0.070, rel=0.01)
    assert found["time of arithmetic"].value == pytest.approx(0.45e-3, rel=0.01)
    assert found["arithmetic waits"].value == pytest.approx(99.4, abs=0.05)
    assert found["intensity of the step"].value == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("device", "bandwidth", "ridge"),
    [("a100-80-sxm", 2000.0, 156), ("a100-80-sxm", 0.0, 153), ("h100-sxm", 0.0, 295)],
)
def test_the_ridge(device: str, bandwidth: float, ridge: float) -> None:
    """Dense: not the 591 of sparse products."""
    found = figures(Inputs(device=device, bandwidth_gb_s=bandwidth))
    assert found["ridge"].value == pytest.approx(ridge, abs=0.5)
    assert found["critical batch"].value == pytest.approx(ridge, abs=0.5)


def test_a_batch_of_32_uses_a_fifth() -> None:
    """32 / 156 = 20.5 %, less what keys, values and activations move."""
    guess = answer(TEXTBOOK).guess
    assert guess is not None
    assert guess.value == pytest.approx(20.5, abs=0.4)


def test_decode_attention_has_the_intensity_of_its_heads() -> None:
    """64 query heads share 8 KV heads: 8 FLOP for each byte of a 2-byte cache, at any batch."""
    for batch in (1, 64):
        drawing = answer(Inputs(batch=batch, context=8192)).drawing
        (attention,) = (one for one in drawing.operators if one.name == "decode_attention")
        assert attention.intensity == pytest.approx(8, rel=0.01)


def test_the_ends_of_the_inputs() -> None:
    for model in ("llama-3.1-405b", "smollm2-135m", "deepseek-v3"):
        for batch, context in ((1, 1), (1024, 131072)):
            for weights in ("fp8", "int4"):
                told = answer(Inputs(model=model, batch=batch, context=context, weights=weights))
                assert all(figure.value >= 0 for figure in told.figures)
    assert "memory waits" in answer(Inputs(model="llama-3.1-8b", mode="prefill")).sentence
