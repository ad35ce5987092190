"""Which formats of tool calls and reasoning are there? Adding one is a class and a line here.

A model's format is found in its chat template: the first parser of the table one of whose `signs`
stands there.
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline import registry
from ridgeline.parsers.parser import Parser, Tags

PARSERS = {
    "harmony": "ridgeline.parsers.harmony:Harmony",
    "qwen3_coder": "ridgeline.parsers.tagged:Qwen3Coder",
    "glm": "ridgeline.parsers.tagged:GLM",
    "deepseek_v3": "ridgeline.parsers.headed:DeepSeekV3",
    "kimi_k2": "ridgeline.parsers.headed:KimiK2",
    "mistral": "ridgeline.parsers.headed:Mistral",
    "pythonic": "ridgeline.parsers.pythonic:Pythonic",
    "hermes": "ridgeline.parsers.json_calls:Hermes",
    "llama3_json": "ridgeline.parsers.json_calls:Llama3JSON",
    "json": "ridgeline.parsers.json_calls:JSONCalls",
    "none": "ridgeline.parsers.parser:Parser",
}
NONE = "none"
REASONING: dict[str, Tags | None] = {
    "think": Tags("<think>", "</think>"),
    "mistral": Tags("[THINK]", "[/THINK]"),
    "seed": Tags("<seed:think>", "</seed:think>"),
    NONE: None,
}
GENERIC = "json"  # for a model whose template knows no tools, which are then told in words


def parser_class(name: str) -> type[Parser]:
    """ConfigError lists the names."""
    found: type[Parser] = registry.load(PARSERS, name, "tool parser")
    return found


def find_parser(templates: Iterable[str]) -> str:
    """The name of the parser for a model with these chat templates."""
    text = "\n".join(templates)
    for name in PARSERS:
        if any(sign in text for sign in parser_class(name).signs):
            return name
    return GENERIC


def find_reasoning(templates: Iterable[str]) -> str:
    """The name of its tags for reasoning, or "none"."""
    text = "\n".join(templates)
    return next((name for name, tags in REASONING.items() if tags and tags.end in text), NONE)
