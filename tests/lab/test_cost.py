"""What a million tokens cost, against figures of teaching texts and arithmetic done by hand."""

from __future__ import annotations

import re

import pytest

from ridgeline.errors import ConfigError
from ridgeline.lab import market
from ridgeline.lab.page import Answer, read_inputs
from ridgeline.lab.pages.cost import PAGE, Drawing, Inputs, answer


def ask(**values: object) -> Answer[Drawing]:
    inputs = read_inputs(PAGE, values)
    assert isinstance(inputs, Inputs)
    return answer(inputs)


def figure(found: Answer[Drawing], name: str) -> float:
    return next(one.value for one in found.figures if one.name == name)


def test_teaching_texts_are_reproduced_and_their_free_laptop_is_not() -> None:
    table = next(one for one in ask().tables if one.title.startswith("Figures"))
    costs = [row[-1] for row in table.rows]
    assert costs[:3] == [0.868, 1.852, 1.111]
    # A million tokens at 8 a second take 34.7 h: 2.08 kWh at 60 W.
    assert "2.1 kWh" in str(table.rows[3][0])
    assert costs[3] == pytest.approx(1e6 / 8 / 3600 * 0.060 * 0.15, abs=0.001)


def test_the_curve_is_price_over_tokens() -> None:
    """36 $ an hour, always busy: 1 $ buys 100 seconds."""
    found = ask(price=36.0, utilisation=1.0, num_input=100, num_output=100, batch=8)
    for point in found.drawing.points:
        every = 2 * point.tokens_per_s  # as many prompt tokens as answer tokens
        assert point.low == point.high == point.mid
        assert point.mid == pytest.approx(1e6 / (100 * every))
    prices = [point.mid for point in found.drawing.points]
    assert prices == sorted(prices, reverse=True)


def test_prompt_and_answer_sum_to_the_bill() -> None:
    found = ask(num_input=1000, num_output=300)
    prompt, answers, blended = found.drawing.bars
    assert 1000 * prompt.mid + 300 * answers.mid == pytest.approx(1300 * blended.mid)
    assert figure(found, "one request") == pytest.approx(1300 * blended.mid / 1e6)


def test_the_api_breaks_even_where_both_bills_are_equal() -> None:
    """1000 tokens at 100 $ a million are 10 cents, of which 10 $ are a hundred."""
    found = ask(price=10.0, num_input=1000, api_input=100.0, api_output=0.0)
    assert figure(found, "cheaper than the API from") == pytest.approx(100.0)
    free = ask(api_input=0.0, api_output=0.0)
    assert "the API is cheaper" in free.sentence


def test_owning_pays_from_a_share_of_the_hours() -> None:
    """8760 $ over a year is 1 $ an hour, used or not; renting at 4 $ pays below a quarter."""
    found = ask(price=4.0, capex=8760.0, years=1.0, dollars_per_kwh=0.0, utilisation=0.5)
    assert figure(found, "an hour of use of an owned device") == pytest.approx(2.0)
    assert figure(found, "owning is cheaper when busy for") == pytest.approx(25.0)


def test_every_price_has_a_source_and_a_date_and_so_has_every_engine() -> None:
    tables = {one.title.split()[0]: one for one in ask().tables}
    for row in tables["Prices"].rows:
        assert row[4]
        assert str(row[5])[:4].isdecimal()
    for *_, source, date in tables["What"].rows:
        assert re.fullmatch(r"(read |assumed )?20\d\d-\d\d(-\d\d)?(: put in yours)?", str(date))
        assert (source == "none") == str(date).startswith("assumed 20")
    engines = tables["Which"]
    assert {"vLLM", "TGI", "TensorRT-LLM", "llama.cpp", "Ridgeline"} == {r[0] for r in engines.rows}
    assert all(len(row) == len(engines.columns) and all(row) for row in engines.rows)
    assert all("20" in str(row[-1]) for row in engines.rows if row[0] != "Ridgeline")


def test_what_is_set_at_first_is_what_was_asked() -> None:
    """The purchase price is an eighth of a server's, the API's price the middle one of five."""
    inputs = Inputs()
    assert abs(8 * inputs.capex - market.H100_SERVER) < 1000
    asked = sorted((one.low, one.high) for one in market.PRICES if "3.1-8B" in one.what)
    assert len(asked) == 5
    assert (inputs.api_input, inputs.api_output) == asked[2]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_input": 30000, "batch": 256}, "have room"),
        ({"model": "llama-3.1-70b"}, "does not fit"),
        ({"device": "a10", "batch": 4}, "no price"),
        ({"model": "llama-2-7b", "num_input": 5000}, "context"),
    ],
)
def test_what_cannot_be_had_is_said_with_a_way_out(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask(**values)


def test_presets_have_answers() -> None:
    for preset in PAGE.presets:
        assert ask(**preset.inputs).drawing.points
