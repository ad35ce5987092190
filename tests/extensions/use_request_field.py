"""Run in a copy of the package that has the field `shouts`: is it everywhere where a field is?

See test_fields.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ridgeline
from ridgeline.cli.flags import sampling_changes
from ridgeline.cli.main import parse
from ridgeline.errors import RequestFault
from ridgeline.frames import frame
from ridgeline.request import Request, RequestOutput, SamplingParams
from ridgeline.server.app import make_routes
from ridgeline.server.chat import read_chat
from ridgeline.server.errors import ApiError
from ridgeline.server.openapi import document
from ridgeline.server.parsed_request import ParsedRequest, read_completion
from ridgeline.server.wire import Add, pack_add, read_command, unpack_add
from ridgeline.text.assemble import SampleAssembler
from ridgeline.text.tokenizer import load_tokenizer
from tests.server.model_folder import write_model_folder
from tools import make_docs

COMPLETION: dict[str, object] = {"model": "m", "prompt": "a"}
CHAT: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


def is_shown() -> None:
    assert sampling_changes(parse(["generate", "m", "--shouts"])) == {"shouts": True}
    assert (
        "| `shouts` | boolean |  | false | the answer in capitals |"
        in make_docs.PARTS["sampling fields"]()
    )
    routes: Any = SimpleNamespace(limits=None)
    schemas = document(make_routes(routes), has_keys=False)["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        shown = schemas[name]["properties"]["shouts"]
        assert {"type": "boolean"} in shown["anyOf"]
        assert shown["description"] == "the answer in capitals (default: false)"


def refusal(call: Any, body: dict[str, object]) -> tuple[str, str | None, str]:
    try:
        call(body)
    except (ApiError, RequestFault) as fault:
        return fault.code, fault.param, str(fault)
    raise AssertionError("it was taken")


def is_checked() -> None:
    for given, words in (("yes", "a string"), (1, "a number"), ([True], "a list")):
        wanted = ("invalid_type", "shouts", f"shouts must be true or false, not {words}")
        bad: dict[str, object] = {"shouts": given}
        assert refusal(lambda body: read_completion(body, {}, 8), COMPLETION | bad) == wanted
        assert refusal(lambda body: read_chat(body, {}, 8), CHAT | bad) == wanted
        assert refusal(lambda body: SamplingParams(**body), bad) == wanted


def engines(call: ParsedRequest) -> SamplingParams:
    """What the engine has of it, behind the socket."""
    sampling = call.sampling.resolved(8, 0, ())
    command = read_command(frame(pack_add(1, [Request("a", (1,), sampling, 0.0)], 0.0))[4:])
    assert isinstance(command, Add)
    return unpack_add(command, 1.0)[0].sampling


def answer(call: ParsedRequest, folder: Path) -> str:
    sample = SampleAssembler(load_tokenizer(folder), call.sampling)
    return sample.push(RequestOutput("a", tuple(b"loud"))).text


def main() -> None:
    print(ridgeline.__file__)
    is_shown()
    is_checked()
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name))
        for asks in (True, False):
            for call in (
                read_completion(COMPLETION | {"shouts": asks}, {}, 8),
                read_chat(CHAT | {"shouts": asks}, {}, 8),
            ):
                assert getattr(engines(call), "shouts") is asks  # noqa: B009  mypy knows no such field
                assert answer(call, folder) == ("LOUD" if asks else "loud")


if __name__ == "__main__":
    main()
