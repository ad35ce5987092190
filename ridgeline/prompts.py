"""What did a caller of the Python API give: prompts, messages, sampling parameters?

Numpy arrays, PyTorch tensors and pandas series are read as the lists they stand for. RequestFault
names the argument that is none of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Number
from typing import Any, NoReturn

from ridgeline.errors import RequestFault
from ridgeline.request import SamplingParams, plain

PROMPT = "a text or a list of token ids"
PROMPTS = f"{PROMPT}, or a list of such prompts"
MESSAGES = "a list of messages such as {'role': 'user', 'content': 'Hello'}"
TEXT_CONTENT = "a text or a list of text parts"


def prompts_of(given: object) -> list[str | list[object]]:
    """One prompt, or several. A list of numbers is one prompt."""
    if isinstance(given, str):
        return [prompt_of(given)]
    items = _items("prompts", given, PROMPTS)
    if not items:
        raise RequestFault("no prompt was given", param="prompts", code="empty_input")
    if isinstance(plain(items[0]), Number):
        return [items]
    return [prompt_of(item, f"prompts[{index}]") for index, item in enumerate(items)]


def prompt_of(given: object, name: str = "prompt") -> str | list[object]:
    """A text, or token ids that `check_prompt` has not seen yet."""
    if isinstance(given, str):
        return str.__str__(given)
    return _items(name, given, PROMPT)


def messages_of(given: object) -> list[dict[str, Any]]:
    """Messages for a chat template, each with a role and a text."""
    if isinstance(given, str):
        _wrong_type("messages", given, MESSAGES)
    return [
        _message(f"messages[{index}]", message)
        for index, message in enumerate(_items("messages", given, MESSAGES))
    ]


def one_sampling_each(
    given: object, count: int, default: SamplingParams
) -> Sequence[SamplingParams]:
    """As many as there are prompts. `default` stands where None was given."""
    if given is None or isinstance(given, SamplingParams):
        return [given or default] * count
    wanted = "a SamplingParams or a list of them"
    if isinstance(given, str):
        _wrong_type("sampling", given, wanted)
    items = _items("sampling", given, wanted)
    if len(items) != count:
        raise RequestFault(
            f"{count} prompts but {len(items)} sampling parameters; give one, or one each",
            param="sampling",
        )
    return [_sampling(f"sampling[{i}]", item, default) for i, item in enumerate(items)]


def at_prompt(fault: RequestFault, index: int) -> RequestFault:
    """The fault of one prompt among several."""
    name, param = f"prompts[{index}]", fault.param or "prompt"
    if param.startswith("prompt"):
        param = name + param.removeprefix("prompt")
    return RequestFault(
        f"{name}: {fault}", param=param, code=fault.code, retry_after_s=fault.retry_after_s
    )


def _sampling(name: str, given: object, default: SamplingParams) -> SamplingParams:
    if given is None:
        return default
    if not isinstance(given, SamplingParams):
        _wrong_type(name, given, "a SamplingParams")
    return given


def _message(name: str, given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        _wrong_type(name, given, "a dict with role and content")
    role = given.get("role")
    if not isinstance(role, str):
        raise RequestFault(f"{name} needs a role", param=f"{name}.role", code="invalid_messages")
    message = {**given, "role": str.__str__(role)}
    if given.get("content") is not None or not given.get("tool_calls"):
        message["content"] = _content(f"{name}.content", given.get("content"))
    return message


def _content(name: str, given: object) -> str:
    """A list of text parts is joined as it stands, as the server does."""
    if isinstance(given, str):
        return str.__str__(given)
    if not isinstance(given, (list, tuple)):
        _wrong_type(name, given, TEXT_CONTENT)
    texts = []
    for index, part in enumerate(given):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            _wrong_type(f"{name}[{index}]", part, "a text part {'type': 'text', 'text': ...}")
        texts.append(text)
    return "".join(texts)


def _items(name: str, given: object, wanted: str) -> list[Any]:
    if isinstance(given, (bytes, bytearray, memoryview)):
        _wrong_type(name, given, f"{wanted}; decode bytes to text first")
    found = plain(given)
    # A set has no order, and a dict is one thing with names.
    if isinstance(found, (str, Mapping, AbstractSet)) or not isinstance(found, Iterable):
        _wrong_type(name, given, wanted)
    return list(found)


def _wrong_type(name: str, given: object, wanted: str) -> NoReturn:
    kind = "None" if given is None else type(given).__name__
    hint = ""
    if isinstance(given, Mapping) and "role" in given and name.startswith("prompt"):
        hint = "; messages go to chat"
    raise RequestFault(f"{name} is {kind}; give {wanted}{hint}", param=name, code="invalid_type")
