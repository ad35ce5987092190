"""Is /openapi.json true? Its bodies against the readers, its replies against real ones, and
Schemathesis, which makes requests of it that are right and wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
import schemathesis
from schemathesis.engine import events, from_schema
from schemathesis.engine.recorder import ScenarioRecorder
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from ridgeline.answer import check_prompt
from ridgeline.clock import WallClock
from ridgeline.declared import Declared, Field, declared
from ridgeline.errors import RequestFault
from ridgeline.request import MAX_TOKEN_ID
from ridgeline.server.app import make_routes
from ridgeline.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChat,
    TokenizeText,
)
from ridgeline.server.chat import read_chat
from ridgeline.server.errors import CODES, SHOWN_AS, ApiError
from ridgeline.server.ignored_fields import IgnoredFields
from ridgeline.server.openapi import PATHS, document
from ridgeline.server.parsed_request import CONSTRAINTS, read_completion
from ridgeline.server.tokenize import detokenize, read_tokenize
from ridgeline.text.tokenizer import load_tokenizer
from tests.server.running import Running, fake_config, running

JSON = "application/json"
KEY = "a-key-for-the-tests"
Body = dict[str, Any]
Put = Callable[[object], Body]  # a whole body with this value in one place


@pytest.fixture(scope="module")
def doc() -> Body:
    routes: Any = SimpleNamespace(limits=None)  # the routes alone: none is called
    made: Body = json.loads(json.dumps(document(make_routes(routes), has_keys=True)))
    return made


def validator(doc: Body, schema: Body) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for({**schema, "components": doc["components"]})


def named(doc: Body, name: str) -> jsonschema_rs.Validator:
    return validator(doc, {"$ref": f"#/components/schemas/{name}"})


def refusals(doc: Body) -> Iterator[tuple[str, str, list[str], Body]]:
    """Path, status, codes, response."""
    for path, operations in doc["paths"].items():
        (operation,) = operations.values()
        for status, response in operation["responses"].items():
            if status != "200":
                _, narrowed = response["content"][JSON]["schema"]["allOf"]
                code = narrowed["properties"]["error"]["properties"]["code"]
                yield path, status, code["enum"], response


def test_it_is_openapi_and_whole(doc: Body) -> None:
    OPENAPI_31_VALIDATOR.validate(doc)
    assert set(doc["paths"]) == set(PATHS)
    for name in doc["components"]["schemas"]:
        named(doc, name)  # raises for a reference that leads nowhere
    described = {code for _, _, codes, _ in refusals(doc) for code in codes}
    assert described == {SHOWN_AS.get(code, code) for code in CODES} - {"method_not_allowed"}


def test_every_refusal_is_as_described(doc: Body) -> None:
    by_shown = {SHOWN_AS.get(code, code): code for code in CODES if code not in SHOWN_AS}
    for path, status, codes, response in refusals(doc):
        schema = validator(doc, response["content"][JSON]["schema"])
        for code in codes:
            error = ApiError(by_shown[code], "why", "field")
            schema.validate(json.loads(error.body()))
            sent = {name.decode().title() for name, _ in error.headers}
            assert ("Retry-After" in sent) == ("Retry-After" in response["headers"]), (path, status)
        assert not schema.is_valid(json.loads(ApiError("method_not_allowed", "why").body()))


# ---------------------------------------------------------------------- bodies and their readers

# What a field needs beside it to be taken.
BESIDE: dict[str, Body] = {
    "min_tokens": {"max_tokens": 1 << 30},
    "use_beam_search": {"n": 2},
    "length_penalty": {"beam_width": 2},
    "early_stopping": {"beam_width": 2},
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
}
VALUES: list[object] = [
    None, True, False, 0, 1, -1, 0.5, 10**30, "", "a", "a\0", "user", "text",
    [], [1], [0.5], [-1], ["a"], [""], ["a\0"], ["a", [1]], [[]], [[1], [2]], [MAX_TOKEN_ID],
    {}, {"a": 1}, {"5": 1}, {"5": None}, {"5": 100.5}, {"5": "a"}, {"05": 1},
]  # fmt: skip
MESSAGE: Body = {"role": "assistant", "content": "a"}  # it alone may say nothing
INNER: dict[str, Body] = {"messages": MESSAGE, "content": {"type": "text", "text": "a"}}


def around(field: Field) -> Iterator[object]:
    """Values at the bounds of a field and beyond, whatever is bounded."""
    for bound in (field.low, field.high):
        if bound is None:
            continue
        step = 1 if field.kind == "integer" else abs(bound) / 1000 or 0.001
        yield from (bound - step, bound, bound + step)
        for count in (int(bound), int(bound) + 1) if 0 < bound < 10_000 else ():
            yield from ("a" * count, ["a"] * count, [1] * count)
            yield {str(i): 1 for i in range(count)}


def putting(base: Body, name: str, then: Callable[[Body], Body]) -> Put:
    return lambda value: then(base | {name: value})


def places(fields: Declared, then: Callable[[Body], Body], base: Body) -> Iterator[tuple[str, Put]]:
    """Each field, and each in the objects in it, and how to put a value there."""
    for name, row in fields.items():
        beside = {k: v for k, v in BESIDE.get(name, {}).items() if k in fields}
        at = putting(base | beside, name, then)
        yield name, at
        if row.fields:
            inner = INNER.get(name, {})
            into = at if row.kind == "object" else in_a_list(at)
            yield "bogus", putting(inner, "bogus", into)
            yield from places(row.fields, into, inner)


def in_a_list(at: Put) -> Callable[[Body], Body]:
    return lambda made: at([made])


def whole(body: Body) -> Body:
    return body


def completion(body: Body) -> None:
    """Token ids are looked at when the engine's requests are made."""
    for prompt in read_completion(body, {}, 512).prompts:
        if not isinstance(prompt, str):
            check_prompt(prompt, MAX_TOKEN_ID)


@pytest.fixture(scope="module")
def readers(fake_model: Path) -> dict[str, Callable[[Body], object]]:
    model: Any = SimpleNamespace(
        check_name=lambda name: None,
        ready=SimpleNamespace(max_servable_tokens=1 << 20, vocab_size=MAX_TOKEN_ID),
        vocabulary=load_tokenizer(fake_model),
        has_chat_template=True,
        max_model_len=1 << 20,
        name="a",
    )
    ignored = IgnoredFields(WallClock(), strict=False, has_priorities=True)

    def of(*kinds: type[msgspec.Struct], read: Callable[[Body], object]) -> Any:
        return lambda body: read(dict(ignored.known(body, kinds)[0]))

    return {
        "CompletionRequest": of(CompletionBody, read=completion),
        "ChatRequest": of(ChatBody, read=lambda body: read_chat(body, {}, 512)),
        "TokenizeRequest": of(
            TokenizeChat, TokenizeText, read=lambda body: read_tokenize(body, model)
        ),
        "DetokenizeRequest": of(DetokenizeBody, read=lambda body: detokenize(body, model)),
    }


@pytest.mark.parametrize(
    ("name", "kind", "base"),
    [
        ("CompletionRequest", CompletionBody, {"prompt": "a"}),
        ("ChatRequest", ChatBody, {"messages": [MESSAGE]}),
        ("TokenizeRequest", TokenizeText, {"prompt": "a"}),
        ("TokenizeRequest", TokenizeChat, {"messages": [MESSAGE]}),
        ("DetokenizeRequest", DetokenizeBody, {"tokens": [1]}),
    ],
)
def test_readers_take_what_is_described_and_nothing_else(
    doc: Body,
    readers: dict[str, Callable[[Body], object]],
    name: str,
    kind: type[msgspec.Struct],
    base: Body,
) -> None:
    """Every field, and every field of the objects in it, with every kind of value."""
    schema, fields = named(doc, name), declared(kind)
    every = [*places(fields, whole, base), ("bogus", putting(base, "bogus", whole))]
    nested = [row.fields or {} for row in fields.values()]
    bounded = {name: row for some in (*nested, fields) for name, row in some.items()}
    taken: Counter[bool] = Counter()
    for key, put in every:
        bounds = around(bounded[key]) if key in bounded else ()
        for value in (*VALUES, *bounds):
            body = put(value)
            try:
                readers[name](body)
                fault: Exception | None = None
            except (ApiError, RequestFault) as error:
                fault = error
            assert schema.is_valid(body) == (fault is None), (body, fault)
            taken[fault is None] += 1
    for key in base:
        rest = {k: v for k, v in base.items() if k != key}
        assert not schema.is_valid(rest)
    assert min(taken[True], taken[False]) > 5, taken


# ---------------------------------------------------------------------- real replies

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
EVERYTHING: Body = {"n": 2, "return_token_ids": True, "include_cost": True, "stop": "q", "seed": 1}
ASKED: list[tuple[str, Body]] = [
    (COMPLETIONS, {"prompt": "a"}),
    (COMPLETIONS, {"prompt": ["a", [1, 2]], "logprobs": 3, "prompt_logprobs": 2, **EVERYTHING}),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 0, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": "a", "beam_width": 3, "n": 2}),
    (COMPLETIONS, {"prompt": "!eos", "stop_token_ids": [97, 98, 99, 100, 101]}),
    (CHATS, {}),
    (CHATS, {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 2, **EVERYTHING}),
]
USAGE: Body = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
STREAMED: list[tuple[str, Body]] = [
    (COMPLETIONS, {"prompt": "a"}),
    (COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 3, **EVERYTHING, **USAGE}),
    (COMPLETIONS, {"prompt": "a", "echo": True}),
    (CHATS, {}),
    (CHATS, {"logprobs": True, "top_logprobs": 3, **EVERYTHING, **USAGE}),
]


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = fake_config(fake_model, engine={"max_model_len": 64})  # answers are short
    with running(config, tmp_path_factory.mktemp("open")) as started:
        yield started


@pytest.fixture(scope="module")
def served(server: Running) -> Body:
    with server.http as http:
        reply = http.get("/openapi.json")
        assert reply.headers["content-type"] == JSON
        assert reply.content == http.get("/openapi.json").content
    found: Body = reply.json()
    return found


def ask(server: Running, path: str, body: Body) -> httpx.Response:
    base: Body = {"model": "fake", "max_tokens": 20}
    if path == CHATS:
        base["messages"] = [{"role": "user", "content": "a"}]
    with server.http as http:
        return http.post(path, json=base | body)


def content_of(served: Body, path: str, reply: httpx.Response) -> jsonschema_rs.Validator:
    """The schema of this reply, by its status and its content type."""
    (operation,) = served["paths"][path].values()
    response = operation["responses"][str(reply.status_code)]
    kind = reply.headers["content-type"].partition(";")[0]
    return validator(served, response["content"][kind]["schema"])


@pytest.mark.parametrize(("path", "body"), ASKED, ids=lambda value: str(value)[:40])
def test_real_replies(server: Running, served: Body, path: str, body: Body) -> None:
    reply = ask(server, path, body)
    assert reply.status_code == 200, reply.text
    content_of(served, path, reply).validate(reply.json())


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=lambda value: str(value)[:40])
def test_real_streams(server: Running, served: Body, path: str, body: Body) -> None:
    """Each event is one line of data: a chunk, or the end."""
    reply = ask(server, path, body | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    event = content_of(served, path, reply)
    record = named(served, "ChatChunk" if path == CHATS else "Completion")
    *lines, done, end = reply.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert lines
    for line in lines:
        name, _, data = line.partition(": ")
        assert name == "data"
        event.validate({"data": data})
        record.validate(json.loads(data))


def test_the_schema_of_an_event_is_that_of_chunks_and_errors(served: Body) -> None:
    for path, record in ((COMPLETIONS, "Completion"), (CHATS, "ChatChunk")):
        content = served["paths"][path]["post"]["responses"]["200"]["content"]
        end, data = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
        assert end == {"const": "[DONE]"}
        refs = [row["$ref"].rpartition("/")[2] for row in data["contentSchema"]["anyOf"]]
        assert refs == [record, "ErrorBody"]
        error = ApiError("engine_unavailable", "why").event().decode()
        validator(served, data["contentSchema"]).validate(json.loads(error.removeprefix("data: ")))


def test_the_other_replies(server: Running, served: Body) -> None:
    """Those that nobody sends a body to, and refusals of routes and models."""
    asked = [path for path, operations in served["paths"].items() if "get" in operations]
    with server.http as http:
        for path in asked:
            reply = http.get(path.replace("{name}", "fake"))
            assert reply.status_code == 200
            if path != "/metrics":
                content_of(served, path, reply).validate(reply.json())
        reply = http.get("/v1/models/other")
    content_of(served, "/v1/models/{name}", reply).validate(reply.json())


# ---------------------------------------------------------------------- Schemathesis

# Valid bodies that are refused: fields that contradict each other, and what the model decides.
CONTRADICTIONS = {
    "stream_options", "length_penalty", "early_stopping", "max_tokens", "max_completion_tokens",
    "min_tokens", "best_of", "n", "top_logprobs", "include_cost", "prompt_logprobs", "stream",
    "beam_width",
}  # fmt: skip
BEAMS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "logit_bias"}
REFUSALS = {
    ("empty_input", "messages"), ("invalid_messages", "messages"), ("model_not_found", "model"),
    ("invalid_token_id", "prompt"), ("invalid_token_id", "tokens"),
    ("invalid_token_id", "stop_token_ids"), ("invalid_token_id", "logit_bias"),
    ("missing_required_parameter", "beam_width"), ("limit_exceeded", "n"),
    ("limit_exceeded", "prompt"), ("invalid_api_key", ""),
    ("invalid_messages", "continue_final_message"), ("invalid_value", "continue_final_message"),
    ("invalid_value", "chat_template_kwargs"),
    *(("context_length_exceeded", name) for name in (
        "prompt", "messages", "tokens", "max_tokens", "max_completion_tokens", "beam_width")),
    *(("invalid_value", name) for name in CONTRADICTIONS),
    *(("unsupported_parameter", name) for name in BEAMS),
    # The model of these tests has no grammars; and only one of the fields may be given.
    *(
        (code, name)
        for name in (*CONSTRAINTS, "tool_choice")
        for code in ("invalid_value", "unsupported_parameter", "missing_required_parameter")
    ),
}  # fmt: skip


@dataclass
class Outcome:
    """What Schemathesis did, and what is wrong with it. `accepted` of right cases, by path."""

    num_cases: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, recorder: ScenarioRecorder) -> None:
        for case_id, node in recorder.cases.items():
            self.num_cases += 1
            seen = recorder.interactions.get(case_id)
            if seen is None or seen.response is None or node.value.meta is None:
                continue
            is_right = node.value.meta.generation.mode.is_positive
            path, status = node.value.operation.path, seen.response.status_code
            self.accepted[path] += is_right and status == 200
            self.rejected[path] += not is_right and status in (400, 415)
            if is_right and status != 200:
                self._judge(path, seen.response.content)
        for case_id, checks in recorder.checks.items():
            for check in checks:
                if check.failure_info is not None:
                    shown = check.failure_info.failure
                    sample = check.failure_info.code_sample
                    self.faults.append(f"{case_id} {check.name}: {shown.message}\n{sample}")

    def _judge(self, path: str, content: bytes) -> None:
        """A right case was refused: is the reason one that no schema can tell?"""
        error = json.loads(content)["error"]
        param = (error["param"] or "").partition("[")[0].partition(".")[0]
        if (error["code"], param) not in REFUSALS or "must be between" in error["message"]:
            self.faults.append(f"{path} refused what is described: {error}")


def explore(server: Running, served: Body, max_examples: int, mode: str = "all") -> Outcome:
    settings = {
        "base-url": server.url,
        "headers": {"Authorization": f"Bearer {server.key}"} if server.key else {},
        "continue-on-failure": True,
        "phases": {"coverage": {"enabled": mode == "all"}},  # each bound of each field
        "generation": {
            "max-examples": max_examples, "deterministic": True, "database": "none", "mode": mode,
        },
        # 400 and 404 of right cases are judged here, by code and field.
        "checks": {"positive_data_acceptance": {"expected-statuses": ["200", "400", "404"]}},
    }  # fmt: skip
    config = schemathesis.Config.from_dict(settings)
    outcome = Outcome()
    for event in from_schema(schemathesis.openapi.from_dict(served, config=config)).execute():
        if isinstance(event, events.ScenarioFinished):
            outcome.note(event.recorder)
        elif isinstance(event, events.NonFatalError):
            outcome.faults.append(str(event.info))
        elif isinstance(event, events.FatalError):
            raise event.exception
    print(f"{outcome.num_cases} cases; right ones accepted: {dict(outcome.accepted)}")
    return outcome


# Narrowed, so that most of what is made goes together, and is short.
TOGETHER: Body = {
    "stream": {"const": True}, "max_tokens": {"const": 8}, "max_completion_tokens": None,
    "min_tokens": None, "length_penalty": None, "early_stopping": None, "tool_choice": None,
    **dict.fromkeys(CONSTRAINTS),
}  # fmt: skip


def with_model(served: Body, narrowed: Body | None = None) -> Body:
    """The document for this model alone."""
    copy: Body = json.loads(json.dumps(served))
    for name in ("CompletionRequest", "ChatRequest"):
        record = copy["components"]["schemas"][name]
        for key, schema in {"model": {"const": "fake"}, **(narrowed or {})}.items():
            record["properties"].pop(key, None)
            if schema is not None:
                record["properties"][key] = schema
                record["required"] = sorted({*record["required"], key})
    return copy


ASKED_PATHS = (COMPLETIONS, CHATS, "/tokenize", "/detokenize")


def check_all(server: Running, served: Body, max_examples: int) -> int:
    """How many cases were made. Right and wrong ones, then right ones that mostly stream."""
    whole = explore(server, with_model(served), max_examples)
    assert not whole.faults, "\n\n".join(whole.faults[:10])
    answers = {path: served["paths"][path] for path in (COMPLETIONS, CHATS)}
    narrowed = with_model(served | {"paths": answers}, TOGETHER)
    streams = explore(server, narrowed, 4 * max_examples, "positive")
    assert not streams.faults, "\n\n".join(streams.faults[:10])
    for path in ASKED_PATHS:
        assert whole.accepted[path] > 3, (path, whole.accepted)
        assert whole.rejected[path] > 10, (path, whole.rejected)
    # How many pass depends on the version of the generator: on some only one of nine.
    assert min(streams.accepted[path] for path in answers) >= 1, streams.accepted
    server.wait_until_idle()
    assert "Traceback" not in server.log.read_text()
    return whole.num_cases + streams.num_cases


@pytest.fixture(scope="module")
def closed(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = fake_config(fake_model, engine={"max_model_len": 64})
    with running(config, tmp_path_factory.mktemp("closed"), key=KEY) as started:
        yield started


def test_schemathesis(server: Running, served: Body) -> None:
    assert check_all(server, served, max_examples=9) > 1000


def test_with_keys(closed: Running, doc: Body) -> None:
    """The document is behind the key as all else is, and says so."""
    assert httpx.get(f"{closed.url}/openapi.json").status_code == 401
    with closed.http as http:
        served = http.get("/openapi.json").json()
    assert served == doc
    few = {path: served["paths"][path] for path in ("/v1/models", "/detokenize", "/health/live")}
    outcome = explore(closed, served | {"paths": few}, 5)
    assert not outcome.faults, "\n\n".join(outcome.faults[:10])
    assert outcome.accepted["/detokenize"] > 3


@pytest.mark.slow
def test_schemathesis_at_length(server: Running, closed: Running, served: Body, doc: Body) -> None:
    num_cases = check_all(server, served, max_examples=1200) + check_all(closed, doc, 50)
    assert num_cases > 10_000
