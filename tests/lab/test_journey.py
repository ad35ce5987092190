"""Are the numbers of a prompt's journey those of the same model in Transformers?"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

from ridgeline import demo
from ridgeline.errors import RequestFault
from ridgeline.lab.page import Answer, read_inputs
from ridgeline.lab.pages.journey import PAGE, STEPS, Drawing, Inputs, answer
from ridgeline.traced import TracedModel

GREEDY = Inputs(temperature=0)


def drawn(inputs: Inputs) -> Drawing:
    *_, last = answer(inputs)
    assert isinstance(last, Answer)
    return last.drawing


@cache
def reference(*token_ids: int) -> Any:
    """What Transformers computes for these tokens, in float32."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        demo.folder(), dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        found = model(ids, output_attentions=True, output_hidden_states=True)
        told = model.generate(ids, max_new_tokens=8, do_sample=False)
    return found, told[0, len(token_ids) :].tolist()


def test_the_trace_is_what_transformers_computes() -> None:
    token_ids = [piece.id for piece in drawn(GREEDY).pieces]
    ours = TracedModel(demo.folder(), 32).read(token_ids)
    theirs, _ = reference(*token_ids)
    for own, other in zip(ours.weights, theirs.attentions, strict=True):
        torch.testing.assert_close(own, other[0], rtol=1e-3, atol=1e-5)
    for own, other in zip(ours.states_LTE[:-1], theirs.hidden_states, strict=False):
        torch.testing.assert_close(own, other[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.logits_LV[-1], theirs.logits[0, -1], rtol=1e-3, atol=1e-3)


def test_the_page_shows_that_trace() -> None:
    drawing = drawn(Inputs(temperature=0, layer=5, head=3))
    theirs, told = reference(*(piece.id for piece in drawing.pieces))
    shown = torch.tensor(drawing.weights)
    torch.testing.assert_close(shown, theirs.attentions[4][0, 2], rtol=0, atol=1e-4)
    assert shown.triu(1).abs().max() == 0
    assert drawing.row == drawing.weights[-1]  # the pass over the prompt chose the first token
    peaks = [[float(rows[-1].max()) for rows in layer[0]] for layer in theirs.attentions]
    torch.testing.assert_close(torch.tensor(drawing.peaks), torch.tensor(peaks), rtol=0, atol=1e-4)
    vector = theirs.hidden_states[0][0, 2, : len(drawing.vectors[2])]
    torch.testing.assert_close(torch.tensor(drawing.vectors[2]), vector, rtol=0, atol=1e-3)
    likely = theirs.logits[0, -1].softmax(-1)
    for one in drawing.candidates:
        assert one.probability == pytest.approx(float(likely[one.id]), abs=1e-5)
    assert [one.id for one in drawing.said] == told


def test_a_sum_is_right_and_ends_with_a_stop_token() -> None:
    drawing = drawn(Inputs())
    assert drawing.text == "42"  # 17 + 25
    assert drawing.reason == "stop"
    assert [one.text for one in drawing.said] == ["4", "2", "<|end|>"]
    assert drawing.said[-1].gave == ""


def test_later_tokens_see_what_was_said() -> None:
    drawing = drawn(Inputs(temperature=0, at=1))
    assert [piece.text for piece in drawing.seen][-1] == "4"
    assert len(drawing.row) == len(drawing.pieces) + 1
    assert sum(drawing.row) == pytest.approx(1, abs=1e-2)


def test_sampling_is_shaped_by_its_settings() -> None:
    story = {"text": "Once upon a time, there was a little", "chat": False, "longest": 1}
    hot = drawn(Inputs(temperature=2, **story))  # type: ignore[arg-type]
    cut = drawn(Inputs(temperature=1, top_k=2, **story))  # type: ignore[arg-type]
    greedy = drawn(Inputs(temperature=0, **story))  # type: ignore[arg-type]
    best = hot.candidates[0]
    assert best.drawn_from < best.probability
    assert (cut.num_drawn_from, greedy.num_drawn_from) == (2, 1)
    two = [one.probability for one in cut.candidates[:2]]
    assert cut.candidates[0].drawn_from == pytest.approx(two[0] / sum(two))
    assert greedy.said[0].id == greedy.candidates[0].id
    assert greedy.reason == "length"


@pytest.mark.parametrize(
    ("text", "words"), [("  ", "text is empty"), ("1234567890" * 20, "Shorten it")]
)
def test_prompts_that_cannot_be_traced_are_refused(text: str, words: str) -> None:
    with pytest.raises(RequestFault, match=words) as fault:
        list(answer(Inputs(text=text)))
    assert fault.value.param == "text"


@pytest.mark.parametrize("preset", [preset.name for preset in PAGE.presets])
def test_presets_are_inputs(preset: str) -> None:
    chosen = next(one for one in PAGE.presets if one.name == preset)
    inputs = read_inputs(PAGE, chosen.inputs)
    assert isinstance(inputs, Inputs)
    assert inputs.step in STEPS
    assert drawn(inputs).text
