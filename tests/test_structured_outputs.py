"""Do answers keep to their schemas, expressions and grammars, however they are made?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from random import Random
from typing import Any

import pytest

from ridgeline import LLM, RequestFault, SamplingParams
from ridgeline.observe.explain import explain
from tests.captures import captures, records
from tests.conftest import TEST_DEVICE
from tests.random_schemas import Schema, is_valid, random_schema

DRAFTS = ("off", "draft:demo:draft:3", "ngram:4")
LONGEST = 1500
PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
Make = Callable[[str], LLM]


@pytest.fixture(scope="module")
def made() -> Iterator[Make]:
    """The bundled model by how it drafts; each is made once."""
    open_ones: list[LLM] = []

    @cache
    def make(speculate: str) -> LLM:
        llm = LLM(
            "demo:chat", dtype="float32", speculate=speculate, num_blocks=1200, max_num_seqs=8,
            warm_up="off", device=TEST_DEVICE,
        )  # fmt: skip
        open_ones.append(llm)
        return llm

    yield make
    for llm in open_ones:
        llm.close()


def asking(seed: int = 0, max_tokens: int = LONGEST, **constraint: Any) -> SamplingParams:
    return SamplingParams(
        structured_outputs=constraint, max_tokens=max_tokens, temperature=1.0, seed=seed
    )


def schemas(seed: int, number: int) -> list[Schema]:
    random = Random(seed)
    return [random_schema(random) for _ in range(number)]


def check_all(llm: LLM, world: int, number: int, **changes: Any) -> list[str]:
    """Answers to random schemas at temperature 1, each of them valid."""
    print("seed", world)
    every = schemas(world, number)
    asked = [asking(i, json=schema).replace(**changes) for i, schema in enumerate(every)]
    results = llm.generate(["Answer in JSON:"] * number, asked, progress=False)
    for schema, result in zip(every, results, strict=True):
        assert result.finish_reason == "stop", (schema, result.text[-200:], result.error)
        assert is_valid(schema, result.text), (schema, result.text)
    return [result.text for result in results]


@captures
def test_random_schemas(made: Make) -> None:
    """The seed decides each answer, so drafts change none of them."""
    plain, *drafted = (check_all(made(speculate), 7, 12) for speculate in DRAFTS)
    assert drafted == [plain, plain]


@captures
@pytest.mark.parametrize("speculate", DRAFTS[1:])
def test_schemas_of_answers_without_a_seed(made: Make, speculate: str) -> None:
    check_all(made(speculate), 8, 6, seed=None, top_p=0.95, frequency_penalty=0.2)


@captures
@pytest.mark.slow
@pytest.mark.parametrize("speculate", DRAFTS)
def test_a_thousand_random_schemas(made: Make, speculate: str) -> None:
    for seed in range(10):
        check_all(made(speculate), 1000 + seed, 100)


@captures
@pytest.mark.parametrize("speculate", ["off", "draft:demo:draft:3"])
def test_streamed_is_the_same_as_whole(made: Make, speculate: str) -> None:
    llm = made(speculate)
    for seed, schema in enumerate(schemas(9, 2)):
        sampling = asking(seed, json=schema)
        pieces = "".join(piece.text for piece in llm.stream("Answer in JSON:", sampling))
        assert pieces == llm.generate("Answer in JSON:", sampling)[0].text
        assert is_valid(schema, pieces)


def test_other_forms(made: Make) -> None:
    llm = made("off")

    def answer(**constraint: Any) -> str:
        return llm.generate("Say:", asking(1, **constraint), progress=False)[0].text

    assert re.fullmatch("[0-9]{3}-[a-f]{1,4}", answer(regex="[0-9]{3}-[a-f]{1,4}"))
    assert answer(choice=["yes", 'n"o', "Ω\n"]) in ("yes", 'n"o', "Ω\n")
    assert re.fullmatch("(ab){1,3}!", answer(grammar='start: pair pair? pair? "!"\npair: "ab"'))
    assert re.fullmatch("x[0-9]{2}", answer(grammar='root ::= "x" digit digit\ndigit ::= [0-9]'))
    assert isinstance(json.loads(answer(json_object=True)), dict)
    assert json.loads(answer(json='{"const": [1, null]}')) == [1, None]
    json.loads(answer(json={"type": "string", "maxLength": 5}))


def test_structural_tag(made: Make) -> None:
    """Whatever text comes, what stands behind a trigger has its form."""
    tag = {
        "structures": [{"begin": "The ", "schema": {"type": "integer", "maximum": 99,
                        "minimum": 0}, "end": "</n>"}],
        "triggers": ["The"],
    }  # fmt: skip
    sampling = asking(structural_tag=tag, max_tokens=60)
    results = made("off").generate(["Tell me a story."] * 8, [
        sampling.replace(seed=i) for i in range(8)
    ], progress=False)  # fmt: skip
    found = [part for r in results for part in re.findall("The(.{0,20})", r.text, re.DOTALL)]
    whole = [part for part in found if len(part) == 20]
    assert whole
    assert all(re.match(r" [0-9]{1,2}</n>", part) for part in whole)


@records
def test_ranks_get_the_masks_of_the_first(made: Make) -> None:
    """Two ranks sample each for itself, and give what one does."""
    asked = [asking(i, json=PERSON) for i in range(3)]
    with LLM(
        "demo:chat", dtype="float32", tp=2, speculate="draft:demo:draft:3", num_blocks=200,
        max_num_seqs=4, warm_up="off", device="cpu",
    ) as llm:  # fmt: skip
        found = llm.generate(["Who?"] * 3, asked, progress=False)
    alone = made("off").generate(["Who?"] * 3, asked, progress=False)
    assert [result.text for result in found] == [result.text for result in alone]
    assert all(is_valid(PERSON, result.text) for result in found)


def test_many_answers_with_logprobs(made: Make) -> None:
    sampling = asking(3, json=PERSON).replace(n=3, logprobs=2)
    result = made("off").generate("Who?", sampling, progress=False)[0]
    assert all(is_valid(PERSON, choice.text) for choice in result.outputs)
    assert len({choice.text for choice in result.outputs}) > 1
    entries = result.outputs[0].logprobs
    assert entries is not None
    assert all(entry.logprob <= 0 for entry in entries)  # of all tokens, not of those allowed


def test_a_stop_string_ends_an_answer(made: Make) -> None:
    sampling = asking(3, json=PERSON).replace(stop=('"age"',))
    text = made("off").generate("Who?", sampling, progress=False)[0].text
    assert text.startswith("{")
    assert '"age"' not in text


@captures
@pytest.mark.parametrize("speculate", ["off", "draft:demo:draft:3"])
def test_beside_answers_that_are_free(made: Make, speculate: str) -> None:
    """A step with both kinds of rows: the free ones get what they get alone."""
    llm = made(speculate)
    free = [SamplingParams(max_tokens=30, temperature=t, seed=5) for t in (0.0, 1.0)]
    alone = [llm.generate("Once", one, progress=False)[0].text for one in free]
    mixed = llm.generate(
        ["Once", "Who?", "Once", "Who?"],
        [free[0], asking(1, json=PERSON), free[1], asking(2, json=PERSON)],
        progress=False,
    )
    assert [mixed[0].text, mixed[2].text] == alone
    assert is_valid(PERSON, mixed[1].text)
    assert is_valid(PERSON, mixed[3].text)


@captures
@pytest.mark.parametrize("speculate", ["off", "ngram:4"])
def test_preempted_answers_go_on(speculate: str) -> None:
    """Of rows that lose their blocks in the middle, the matcher is where they were."""
    longer = {"type": "array", "items": PERSON, "minItems": 4, "maxItems": 4}
    with LLM(
        "demo:chat", speculate=speculate, num_blocks=40, max_num_seqs=8, warm_up="off",
        max_model_len=600, device=TEST_DEVICE,
    ) as llm:  # fmt: skip
        asked = [asking(i, json=longer, max_tokens=500) for i in range(6)]
        results = llm.generate(["People:"] * 6, asked, progress=False)
    assert sum(result.metrics.num_preemptions for result in results)
    for result in results:
        assert result.finish_reason == "stop", result.text
        assert is_valid(longer, result.text)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"json": {"not": {}}}, {}, "structured_outputs", '"not"'),
    ({"json": {"type": "array", "uniqueItems": True}}, {}, "structured_outputs", "uniqueItems"),
    ({"json": {"$ref": "http://a/b"}}, {}, "structured_outputs", "http://a/b"),
    ({"json": {"type": "string", "format": "colour"}}, {}, "structured_outputs", "colour"),
    ({"json": {"minimum": 3, "maximum": 2, "type": "integer"}}, {}, "structured_outputs", "(3)"),
    ({"json": 3}, {}, "structured_outputs.json", "JSON schema"),
    ({"json": "{"}, {}, "structured_outputs.json", "no JSON"),
    ({"regex": "(?=a)"}, {}, "structured_outputs", "look-around"),
    ({"grammar": "start: other"}, {}, "structured_outputs", "other"),
    ({"grammar": "root ::= ("}, {}, "structured_outputs", "GBNF"),
    ({"choice": []}, {}, "structured_outputs.choice", "empty"),
    ({"choice": ["a"], "regex": "a"}, {}, "structured_outputs", "not several"),
    ({}, {"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "unknown"),
    ({"regex": "a" * 140_000}, {}, "structured_outputs", "131072 bytes"),
    ({"regex": "a"}, {"min_tokens": 2}, "min_tokens", "grammar"),
    ({"regex": "a"}, {"ignore_eos": True}, "ignore_eos", "grammar"),
    ({"regex": "a"}, {"beam_width": 2}, "beam_width", "n answers"),
]


@pytest.mark.parametrize(("constraint", "more", "param", "words"), REFUSED, ids=count())
def test_what_cannot_be_had_is_named(
    made: Make, constraint: dict[str, Any], more: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestFault) as caught:
        made("off").generate("x", SamplingParams(**{"structured_outputs": constraint, **more}))
    assert caught.value.param == param
    assert words in str(caught.value)


def test_a_pydantic_model_is_its_schema() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("City", name=(str, ...), people=(int, ...))
    asked = SamplingParams(structured_outputs={"json": model})
    assert json.loads(asked.constraint)["json"]["required"] == ["name", "people"]
    assert asked.replace(seed=1).constraint == asked.constraint


def test_masks_are_priced(made: Make) -> None:
    """Each token of the answer has a mask, and no token of a free one."""
    llm = made("off")
    before = llm.run_record.totals.num_masked_rows
    result = llm.generate("Who?", asking(4, json=PERSON), progress=False)[0]
    rows = llm.run_record.totals.num_masked_rows
    assert rows - before >= len(result.token_ids)
    llm.generate("Who?", SamplingParams(max_tokens=5), progress=False)
    totals = llm.run_record.totals
    assert totals.num_masked_rows == rows
    assert totals.mask_bytes == pytest.approx(rows * llm.spec.vocab_size * (1 / 8 + 2 + 8))
    server = explain(llm.run_record.evidence(llm.engine.clock.now())).server
    assert (server.num_masked_rows, server.mask_bytes) == (rows, totals.mask_bytes)
    price_s = llm.run_record.pricer.price_masks
    assert price_s(8)[1] > price_s(1)[1] > price_s(0)[1] == 0
