"""The flows of pydantic-ai."""

from __future__ import annotations

from flows import SAY, Server, check, flow, main
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.output import NativeOutput
from pydantic_ai.providers.openai import OpenAIProvider

CALL = SAY + '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class City(BaseModel):
    name: str
    is_capital: bool


def agent(server: Server, **options: object) -> Agent:
    provider = OpenAIProvider(base_url=server.v1, api_key=server.key)
    settings = {"max_tokens": 200, "temperature": 0}
    return Agent(OpenAIChatModel(server.model, provider=provider), model_settings=settings,
                 **options)  # fmt: skip


@flow("run_sync")
def run(server: Server) -> None:
    check(agent(server).run_sync("What is 12 + 30?").output, "an answer")


@flow("instructions and history")
def history(server: Server) -> None:
    own = agent(server, instructions="Be brief.")
    first = own.run_sync("What is 12 + 30?")
    check(own.run_sync("And 1 + 1?", message_history=first.all_messages()).output, "an answer")


@flow("run_stream")
async def stream(server: Server) -> None:
    async with agent(server).run_stream("What is 12 + 30?") as run:
        pieces = [text async for text in run.stream_text(delta=True)]
    check("".join(pieces), pieces)


@flow("a tool is called", needs="tools", scripted=True)
def tools(server: Server) -> None:
    asked: list[str] = []
    own = agent(server)

    @own.tool_plain
    def weather(city: str) -> str:
        asked.append(city)
        return "rain"

    own.run_sync(CALL)
    check(asked == ["Oslo"], asked)


@flow("output_type by a tool", needs="tools")
def by_tool(server: Server) -> None:
    check(isinstance(agent(server, output_type=City).run_sync("Oslo?").output, City), "a city")


@flow("output_type by a schema", needs="schema")
def by_schema(server: Server) -> None:
    own = agent(server, output_type=NativeOutput(City))
    check(isinstance(own.run_sync("Oslo?").output, City), "a city")


if __name__ == "__main__":
    main("pydantic-ai-slim")
