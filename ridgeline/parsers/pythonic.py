"""Calls that are written as Python calls them: `[get_weather(city="Paris"), get_time()]`, as Llama
3.2 and 4 and LFM2 do."""

from __future__ import annotations

import ast
import json
import math
from typing import Any, ClassVar

from ridgeline.parsers.parser import MAX_HEAD, SKIPPED, Broken, Kind, Parser, Reading

NAMES = {"true": True, "false": False, "null": None}


class Pythonic(Parser):
    """A list of calls is what the answer begins with, or what stands behind a tag."""

    begins: ClassVar[tuple[str, ...]] = (
        "<|python_start|>", "<|python_tag|>", "<|tool_call_start|>",
    )  # fmt: skip
    others: ClassVar[tuple[str, ...]] = ("<|python_end|>", "<|tool_call_end|>")
    bare: ClassVar[str] = "["
    signs: ClassVar[tuple[str, ...]] = ("[func_name1(", "<|tool_call_start|>", "<|python_start|>")

    def section(self, begin: str) -> Reading[None]:
        yield from self.expect("[")
        while (yield from self.peek(SKIPPED)) not in ("]", ""):
            name = (yield from self.until(("(",), most=MAX_HEAD)).strip()
            if name not in self.tools and not (begin and name.replace(".", "_").isidentifier()):
                raise Broken
            arguments = json_of((yield from self.value(depth=1, quotes="\"'"))[:-1])
            self.begin_call(name)
            self.emit(Kind.ARGUMENTS, arguments)
        self.take(1)
        if begin:
            yield from self.until(self.others)


def json_of(arguments: str) -> str:
    """What stands between the parentheses of a call, as a JSON object. Raises Broken for more than
    named literals."""
    try:
        call = ast.parse(f"f({arguments}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise Broken
        found = {word.arg: _literal(word.value) for word in call.keywords if word.arg}
        if len(found) != len(call.keywords):
            raise Broken
        return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Broken from None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in NAMES:
        return NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) for key in node.keys if key is not None]
        if len(keys) == len(node.keys) and all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return -value
    raise Broken
