"""The flows of instructor."""

from __future__ import annotations

import instructor
from flows import Server, check, flow, main
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    is_capital: bool


def ask(server: Server, mode: instructor.Mode) -> City:
    own = instructor.from_openai(OpenAI(base_url=server.v1, api_key=server.key), mode=mode)
    return own.chat.completions.create(
        model=server.model, response_model=City, max_tokens=200, max_retries=1,
        messages=[{"role": "user", "content": "Oslo is the capital of Norway."}],
    )  # fmt: skip


@flow("mode TOOLS", needs="tools")
def tools(server: Server) -> None:
    check(isinstance(ask(server, instructor.Mode.TOOLS), City), "a city")


@flow("mode JSON", needs="model")
def json(server: Server) -> None:
    check(isinstance(ask(server, instructor.Mode.JSON), City), "a city")


@flow("mode JSON_SCHEMA", needs="model")
def json_schema(server: Server) -> None:
    check(isinstance(ask(server, instructor.Mode.JSON_SCHEMA), City), "a city")


if __name__ == "__main__":
    main("instructor")
