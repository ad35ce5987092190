"""Which texts may an answer be, by a JSON schema, a regular expression or a grammar?

`Sampling.structured_outputs` holds one constraint as JSON text. The library llguidance makes a
matcher of it, which says after each token which tokens may follow.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

from ridgeline.errors import RequestFault

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_COMPILED = 64  # constraints that are kept, those that were used last
# Between the parts of a JSON text: what printers of JSON write, and never without an end.
WHITESPACE = r"[ ]?|\n[ ]{0,12}"
MOST_LETTERS = 300  # of an error of the library
# Of llguidance, whose words for them are in its LLParserLimits: a constraint that needs more is an
# error of its request. The first bounds compiling to about 20 ms for each of its regular
# expressions, the next two one mask to about 10 ms, the last the memory to about 50 MB.
MAX_COMPILE_FUEL = 1_000_000
MAX_MASK_FUEL = 100_000
MAX_MASK_ITEMS = 50_000
MAX_LEXER_STATES = 30_000
_OPTIONS = {"whitespace_pattern": WHITESPACE}
_PARAM = "structured_outputs"
TOOLS = "tools"  # a constraint of ours: calls that an answer consists of


class GrammarCompiler:
    """Compiles constraints for one vocabulary. `tokens`: the bytes of each token id, as many as the
    model has logits. Constraints end with one of `end_token_ids`, of which there is at least one.
    """

    def __init__(
        self, tokens: Sequence[bytes], special_ids: frozenset[int], end_token_ids: frozenset[int]
    ) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        ends = sorted(end_token_ids)
        words = _Words(tokens, sorted(special_ids | end_token_ids), ends[0])
        self._tokenizer = LLTokenizer(TokenizerWrapper(words), len(tokens), ends)
        self._limits = LLParserLimits(
            initial_lexer_fuel=MAX_COMPILE_FUEL,
            step_lexer_fuel=MAX_MASK_FUEL,
            step_max_items=MAX_MASK_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def compile(self, constraint: str) -> LLMatcher:
        """A matcher at the beginning of an answer. RequestFault says what cannot be had."""
        with self._lock:
            return self._copy_of(constraint)

    def _copy_of(self, constraint: str) -> LLMatcher:
        if (found := self._compiled.get(constraint)) is None:
            found = self._compile(constraint)
            self._compiled[constraint] = found
            if len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(constraint)
        return found.deep_copy()

    def _compile(self, constraint: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(
            self._tokenizer, grammar_text(constraint), log_level=0, limits=self._limits
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # what the first mask makes, copies then share
        if matcher.is_error():
            self._refuse_tool(constraint)
            refuse(matcher.get_error())
        return matcher

    def _refuse_tool(self, constraint: str) -> None:
        """RequestFault for the first tool whose parameters cannot be had by themselves."""
        from llguidance import LLMatcher

        for place, name, schema in json.loads(constraint).get(TOOLS, {}).get("tools", ()):
            matcher = LLMatcher(self._tokenizer, _json(schema), log_level=0, limits=self._limits)
            if matcher.is_error():
                param = f"tools[{place}].function.parameters"
                refuse(matcher.get_error(), param, f"{param} of {name!r}")


class _Words:
    """A vocabulary as llguidance reads it. Texts that the constraint forces are cut into the
    longest tokens there are."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: list[int], end: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = list(tokens), special_ids, end
        special = frozenset(special_ids)
        self._ids = {word: i for i, word in enumerate(tokens) if word and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        found, at = list[int](), 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                if (token_id := self._ids.get(text[at:end])) is not None:
                    found.append(token_id)
                    at = end
                    break
            else:
                break
        return found


def refuse(problem: str, param: str = _PARAM, what: str = "") -> NoReturn:
    """`problem` in the words of llguidance, the first lines of which name the feature. `what` names
    more than the field."""
    words = " ".join(problem.split())[:MOST_LETTERS]
    raise RequestFault(
        f"{what or param}: this cannot be had: {words}", param=param, code="unsupported_schema"
    )


def grammar_text(constraint: str) -> str:
    """The same as llguidance takes it. RequestFault for what is no grammar."""
    ((kind, value),) = json.loads(constraint).items()
    return _TEXTS[kind](value)


def _json(schema: object) -> str:
    from llguidance import LLMatcher

    options: Any = dict(_OPTIONS)
    if not isinstance(schema, dict):  # true and false are schemas, too
        schema = {} if schema else {"anyOf": []}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _regex(pattern: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def _choice(choices: Sequence[str]) -> str:
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)


def _grammar(text: str) -> str:
    """Lark as it is; GBNF is known by its sign for a rule."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as problem:  # whatever its parser raises
        refuse(f"the grammar is no GBNF: {problem}")


def _structural_tag(given: Mapping[str, Any]) -> str:
    """Free text, in which each trigger begins one of the structures."""
    from llguidance import StructTag

    tags = []
    for place, one in enumerate(given["structures"]):
        begin = one["begin"]
        trigger = next((t for t in given["triggers"] if begin.startswith(t)), None)
        if not trigger:
            refuse(f"structures[{place}].begin begins with none of the triggers")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=one["schema"], end=one["end"]))
    return StructTag.to_grammar(tags, assume_special=False)


def tools_constraint(tools: Sequence[tuple[int, str, Mapping[str, Any]]], *, is_list: bool) -> str:
    """An answer that is one call, or a list of one or more, as `parsers.json_calls` reads it.
    `tools`: the place in the request, the name and the schema of the arguments of each."""
    return json.dumps({TOOLS: {"tools": tools, "is_list": is_list}})


def _tools(given: Mapping[str, Any]) -> str:
    """Each schema is a document of its own, to which its references go."""
    calls, rules = [], []
    for i, (_, name, schema) in enumerate(given["tools"]):
        begin = json.dumps({"name": name})[:-1] + ', "arguments": '
        calls.append(f"call_{i}")
        rules += [
            f'call_{i}: {json.dumps(begin)} arguments_{i} "}}"',
            f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': _OPTIONS})}",
        ]
    start = '"[" call (", " call)* "]"' if given["is_list"] else "call"
    return "\n".join([f"start: {start}", f"call: {' | '.join(calls)}", *rules])


_TEXTS: dict[str, Callable[[Any], str]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
    TOOLS: _tools,
}
