"""Do all ways of decoding say the same tokens, and is what is told what was measured?"""

from __future__ import annotations

import pytest
import torch
import transformers

from ridgeline import demo
from ridgeline.attention.native import NativeAttention
from ridgeline.attention.sdpa import SdpaAttention
from ridgeline.lab.page import Answer
from ridgeline.lab.pages.decode_from_scratch import PAGE, Drawing, Inputs, answer
from ridgeline.measure.decode_ways import FIRST_ID, stepwise
from ridgeline.traced import TracedModel


def test_each_way_says_what_transformers_says() -> None:
    """The token after each beginning of what is known, in all ways."""
    prompt = list(range(FIRST_ID, FIRST_ID + 12))
    plain = TracedModel(demo.folder(), 32, attention=SdpaAttention())
    again = [token for _, token in stepwise(plain, prompt, 6, is_cached=False)]
    cached = [token for _, token in stepwise(plain, prompt, 6, is_cached=True)]
    model = transformers.AutoModelForCausalLM.from_pretrained(demo.folder(), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + again])).logits[0]
    assert again == cached == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
    if NativeAttention.supports.lacks(torch.device("cpu")) is None:
        native = TracedModel(demo.folder(), 32, attention=NativeAttention(), dtype=torch.bfloat16)
        (_, first), *_ = stepwise(native, prompt, 1, is_cached=True)
        assert first in logits[len(prompt) - 1].topk(2).indices  # of 16 bits


def test_the_page_tells_what_was_measured() -> None:
    *told, last = answer(Inputs(prompt=4, output=4))
    assert isinstance(last, Answer)
    shares = [one for one in told if isinstance(one, float)]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1
    drawing = last.drawing
    assert isinstance(drawing, Drawing)
    assert [way.name for way in drawing.ways][:2] == ["naive", "KV cache"]
    assert drawing.ways[-1].name == "engine"
    for way in drawing.ways:  # bytes = weights x tokens a second (teaching texts)
        assert len(way.token_s) == 3
        middle = sorted(way.token_s)[1]
        assert way.bytes_per_s == pytest.approx(way.weight_bytes / middle)
    # 11.9 M parameters of 4 and of 2 bytes.
    assert drawing.ways[0].weight_bytes == pytest.approx(4 * 11_899_776, rel=0.01)
    assert drawing.ways[-1].weight_bytes in (
        pytest.approx(4 * 11_899_776, rel=0.01), pytest.approx(2 * 11_899_776, rel=0.01),
    )  # fmt: skip
    assert {one.kind for one in last.figures} == {"measured"}
    assert PAGE.long
