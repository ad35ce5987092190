"""The flows of langchain-openai."""

from __future__ import annotations

from flows import SAY, Server, check, flow, main
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

CALL = SAY + '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def chat(server: Server, **options: object) -> ChatOpenAI:
    options = {"max_tokens": 16, "temperature": 0} | options
    return ChatOpenAI(base_url=server.v1, api_key=server.key, model=server.model, max_retries=0,
                      **options)  # fmt: skip


@flow("invoke")
def invoke(server: Server) -> None:
    reply = chat(server).invoke("What is 12 + 30?")
    check(reply.content and reply.usage_metadata["total_tokens"] > 0, reply)


@flow("stream, with usage")
def stream(server: Server) -> None:
    pieces = list(chat(server, stream_usage=True).stream("What is 12 + 30?"))
    said = "".join(piece.content for piece in pieces)
    check(said == chat(server).invoke("What is 12 + 30?").content, said)


@flow("ainvoke and abatch")
async def ainvoke(server: Server) -> None:
    replies = await chat(server).abatch(["What is 1 + 1?", "What is 2 + 2?"])
    check(all(reply.content for reply in replies), replies)


@flow("system message and history")
def history(server: Server) -> None:
    reply = chat(server).invoke(
        [SystemMessage("Be brief."), HumanMessage("Hello"), AIMessage("Hi"), HumanMessage("1 + 1?")]
    )
    check(reply.content, reply)


@flow("logprobs, seed, stop")
def options(server: Server) -> None:
    reply = chat(server, logprobs=True, top_logprobs=2, seed=5, stop=["\n\n"]).invoke("1 + 1?")
    check(reply.response_metadata["logprobs"]["content"], reply)


@flow("completions")
def completions(server: Server) -> None:
    model = OpenAI(base_url=server.v1, api_key=server.key, model=server.model, max_tokens=8)
    check(model.invoke("Once upon a time"), "a text")
    check("".join(model.stream("Once upon a time")), "a text")


@flow("bind_tools: a call", needs="tools", scripted=True)
def tools(server: Server) -> None:
    reply = chat(server, max_tokens=200).bind_tools([weather]).invoke(CALL)
    (made,) = reply.tool_calls
    check((made["name"], made["args"]) == ("weather", {"city": "Oslo"}), made)


@flow("tools: the result of a call goes back", needs="tools")
def result(server: Server) -> None:
    call = {"name": "weather", "args": {"city": "Oslo"}, "id": "call_1", "type": "tool_call"}
    messages = [
        HumanMessage("The weather in Oslo?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("rain", tool_call_id="call_1"),
    ]
    check(chat(server).invoke(messages).content, "an answer")


@flow("with_structured_output: json_schema", needs="schema")
def structured(server: Server) -> None:
    model = chat(server, max_tokens=200).with_structured_output(City, method="json_schema")
    check(isinstance(model.invoke("Oslo?"), City), "a city")


@flow("with_structured_output: function_calling", needs="tools")
def by_function(server: Server) -> None:
    model = chat(server, max_tokens=400, temperature=1, seed=1)  # greedily a name may not end
    model = model.with_structured_output(City, method="function_calling")
    check(isinstance(model.invoke("Oslo?"), City), "a city")


@flow("embeddings", needs="embeddings")
def embeddings(server: Server) -> None:
    model = OpenAIEmbeddings(base_url=server.v1, api_key=server.key, model=server.model,
                             check_embedding_ctx_length=False)  # fmt: skip
    check(len(model.embed_query("one")) > 8, "a vector")


if __name__ == "__main__":
    main("langchain-openai")
