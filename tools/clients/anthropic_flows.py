"""The flows of anthropic, the SDK that Claude Code's wire format is of."""

from __future__ import annotations

from anthropic import Anthropic, NotFoundError
from flows import Server, check, flow, main

SUM = [{"role": "user", "content": "What is 12 + 30?"}]


def client(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url, api_key=server.key, max_retries=0)


@flow("models.list")
def models(server: Server) -> None:
    names = [card.id for card in client(server).models.list()]
    check(server.model in names, names)


@flow("an error keeps its status")
def error(server: Server) -> None:
    try:
        client(server).models.retrieve("no-such-model")
    except NotFoundError:
        return
    raise AssertionError("there is no such model")


@flow("messages.create", needs="messages")
def create(server: Server) -> None:
    reply = client(server).messages.create(model=server.model, max_tokens=16, messages=SUM)
    check(reply.content[0].text and reply.usage.output_tokens > 0, reply)


@flow("messages.stream", needs="messages")
def stream(server: Server) -> None:
    with client(server).messages.stream(
        model=server.model, max_tokens=16, messages=SUM, system="Be brief."
    ) as events:
        check("".join(events.text_stream), "a text")


@flow("messages.count_tokens", needs="messages")
def count(server: Server) -> None:
    counted = client(server).messages.count_tokens(model=server.model, messages=SUM)
    check(counted.input_tokens > 0, counted)


if __name__ == "__main__":
    main("anthropic")
