"""The flows of openai-python."""

from __future__ import annotations

import json

import openai
from flows import SAY, Server, check, flow, main
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
CALL = SAY + '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    name: str
    is_capital: bool


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)


def chat(server: Server, **options: object) -> object:
    options = {"messages": SUM, "max_tokens": 16, "temperature": 0, "model": server.model} | options
    return client(server).chat.completions.create(**options)


def text(server: Server, **options: object) -> str:
    content = chat(server, **options).choices[0].message.content
    check(isinstance(content, str) and content, content)
    return content


@flow("models.list and models.retrieve")
def models(server: Server) -> None:
    names = [card.id for card in client(server).models.list()]
    check(server.model in names, names)
    check(client(server).models.retrieve(server.model).id == server.model, names)


@flow("chat")
def whole(server: Server) -> None:
    reply = chat(server)
    check(reply.choices[0].finish_reason in ("stop", "length"), reply)
    check(reply.usage.total_tokens > reply.usage.prompt_tokens > 0, reply.usage)


@flow("chat, streamed, with usage")
def streamed(server: Server) -> None:
    events = list(chat(server, stream=True, stream_options={"include_usage": True}))
    said = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    check(said == text(server), said)
    check(events[-1].usage.completion_tokens > 0, events[-1])


@flow("chat.completions.stream helper")
def helper(server: Server) -> None:
    with client(server).chat.completions.stream(
        model=server.model, messages=SUM, max_tokens=16, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    check("content.delta" in kinds, kinds)
    check(final.choices[0].message.content == text(server), final)


@flow("async chat, ten at once")
async def at_once(server: Server) -> None:
    import asyncio

    async with AsyncOpenAI(base_url=server.v1, api_key=server.key) as own:
        replies = await asyncio.gather(
            *(own.chat.completions.create(model=server.model, messages=SUM, max_tokens=4)
              for _ in range(10))
        )  # fmt: skip
    check(len({reply.id for reply in replies}) == 10, replies)


@flow("async chat, streamed and left early")
async def left(server: Server) -> None:
    async with AsyncOpenAI(base_url=server.v1, api_key=server.key) as own:
        stream = await own.chat.completions.create(model=server.model, messages=SUM, stream=True)
        async for _ in stream:
            break
        await stream.close()


@flow("system, developer, content parts and history")
def roles(server: Server) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "12 + 30?"}]
    text(server, messages=[{"role": "system", "content": "Be brief."}, *SUM])
    text(server, messages=[{"role": "developer", "content": "Be brief."}, *SUM])
    check(text(server, messages=[{"role": "user", "content": parts}]) == text(server), "parts")
    text(server, messages=[*SUM, {"role": "assistant", "content": "42"}, *SUM])
    first = chat(server).choices[0].message  # the record of an answer, sent back as it is
    text(server, messages=[*SUM, first, *SUM])
    text(server, messages=[*SUM, first.model_dump(), *SUM])


@flow("empty and null content")
def empty(server: Server) -> None:
    chat(server, messages=[{"role": "system", "content": ""}, *SUM])
    chat(server, messages=[*SUM, {"role": "assistant", "content": None}, *SUM])


@flow("sampling: seed, n, stop, penalties, logit_bias")
def sampling(server: Server) -> None:
    one, other = (text(server, temperature=1, seed=5) for _ in range(2))
    check(one == other, (one, other))
    check(len(chat(server, n=3, temperature=1).choices) == 3, "n")
    text(server, stop=["\n\n", "###", "User:", "Human:", "</s>", "Q:"])
    text(server, stop="")
    text(server, presence_penalty=0.5, frequency_penalty=0.5, top_p=0.9, logit_bias={"5": -100})


@flow("logprobs")
def logprobs(server: Server) -> None:
    entries = chat(server, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    check(entries and len(entries[0].top_logprobs) == 3, entries)


@flow("fields of other servers and of none")
def extra(server: Server) -> None:
    raw = client(server).chat.completions.with_raw_response.create(
        model=server.model, messages=SUM, max_tokens=4, store=True, metadata={"a": "b"}, user="u",
        service_tier="auto", max_completion_tokens=4, extra_body={"top_k": 5, "no_such_field": 1},
    )  # fmt: skip
    named = raw.headers.get("x-ignored-fields", "")
    check("no_such_field" in named and "store" in named and "top_k" not in named, named)
    check(raw.parse().choices[0].message.content, raw.parse())


@flow("a request id of the client's own")
def own_id(server: Server) -> None:
    headers = {"X-Request-Id": "mine-1"}
    reply = chat(server, extra_headers=headers)
    check(reply._request_id == "mine-1", reply._request_id)


@flow("completions: whole, streamed, a list, token ids, echo")
def completions(server: Server) -> None:
    ask = client(server).completions.create
    common = {"model": server.model, "max_tokens": 8, "temperature": 0}
    said = ask(prompt="Once upon a time", **common).choices[0].text
    pieces = ask(prompt="Once upon a time", stream=True, **common)
    check("".join(e.choices[0].text for e in pieces if e.choices) == said, said)
    check(len(ask(prompt=["One", "Two"], **common).choices) == 2, "a list")
    check(ask(prompt=[5, 6, 7], **common).choices, "token ids")
    scored = ask(prompt="Once upon a time", echo=True, logprobs=1, **(common | {"max_tokens": 0}))
    check(scored.choices[0].text == "Once upon a time", scored)
    check(len(scored.choices[0].logprobs.token_logprobs) == scored.usage.prompt_tokens, scored)


@flow("errors: model, path, value, message")
def errors(server: Server) -> None:
    for options, kind in (
        ({"model": "no-such-model"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"max_tokens": 1 << 29}, openai.BadRequestError),
    ):
        try:
            chat(server, **options)
        except kind as error:
            check(error.request_id and error.body["message"], error)
        else:
            raise AssertionError(f"{options} was served")


@flow("tool_choice none", needs="")
def no_tool(server: Server) -> None:
    text(server, tools=[TOOL], tool_choice="none")


@flow("the scripted model says what it is told to", scripted=True)
def say(server: Server) -> None:
    for said in ("yes", '{"a": [1, "\u00e9"]}', CALL.removeprefix(SAY)):
        told = text(server, messages=[{"role": "user", "content": SAY + said}], max_tokens=200)
        check(told == said, told)


@flow("tools: a call, whole", needs="tools", scripted=True)
def call(server: Server) -> None:
    for options in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}):
        reply = chat(server, messages=[{"role": "user", "content": CALL}], tools=[TOOL],
                     max_tokens=200, **options)  # fmt: skip
        (made,) = reply.choices[0].message.tool_calls
        check(made.function.name == "weather", made)
        check(json.loads(made.function.arguments) == {"city": "Oslo"}, made)
        check(reply.choices[0].finish_reason == "tool_calls", reply)


@flow("tools: a call, streamed", needs="tools", scripted=True)
def call_streamed(server: Server) -> None:
    with client(server).chat.completions.stream(
        model=server.model, messages=[{"role": "user", "content": CALL}], tools=[TOOL],
        max_tokens=200,
    ) as stream:  # fmt: skip
        (made,) = stream.get_final_completion().choices[0].message.tool_calls
    check(json.loads(made.function.arguments) == {"city": "Oslo"}, made)


@flow("tools: the result of a call goes back", needs="tools")
def result(server: Server) -> None:
    made = {"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}  # fmt: skip
    messages = [
        *SUM,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    text(server, messages=messages, tools=[TOOL], tool_choice="none")


@flow("tools: required and named", needs="tools")
def required(server: Server) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        reply = chat(server, tools=[TOOL], tool_choice=choice, max_tokens=200,
                     parallel_tool_calls=False)  # fmt: skip
        (made,) = reply.choices[0].message.tool_calls
        check("city" in json.loads(made.function.arguments), made)


@flow("response_format: json_object", needs="schema")
def json_object(server: Server) -> None:
    said = text(server, response_format={"type": "json_object"}, max_tokens=200)
    check(isinstance(json.loads(said), dict), said)


@flow("response_format: a pydantic model by parse", needs="schema")
def parse(server: Server) -> None:
    reply = client(server).chat.completions.parse(
        model=server.model, messages=SUM, response_format=City, max_tokens=200
    )
    check(isinstance(reply.choices[0].message.parsed, City), reply)


@flow("structured_outputs: choice and regex", needs="schema")
def choice(server: Server) -> None:
    for options, allowed in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_regex": "(left|right)"}, ("left", "right")),
    ):
        check(text(server, extra_body=options) in allowed, options)


@flow("responses.create", needs="responses")
def responses(server: Server) -> None:
    reply = client(server).responses.create(model=server.model, input="What is 12 + 30?",
                                            max_output_tokens=16)  # fmt: skip
    check(reply.output_text, reply)


@flow("responses.create, streamed", needs="responses")
def responses_streamed(server: Server) -> None:
    events = list(client(server).responses.create(
        model=server.model, input="What is 12 + 30?", max_output_tokens=16, stream=True
    ))  # fmt: skip
    check(events[-1].type in ("response.completed", "response.incomplete"), events[-1])


@flow("embeddings", needs="embeddings")
def embeddings(server: Server) -> None:
    reply = client(server).embeddings.create(model=server.model, input=["one", "two"])
    check(len(reply.data) == 2 and len(reply.data[0].embedding) > 8, reply.usage)


if __name__ == "__main__":
    main("openai")
