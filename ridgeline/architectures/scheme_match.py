"""Does a target or an exception of a quantization_config mean this module?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.quantization_scheme import Scheme
from ridgeline.errors import ConfigError

Find = Callable[[str], Scheme | None]  # module name -> how its matrix is stored
PATTERN = "re:"
MAX_NAMES, MAX_LENGTH = 1 << 16, 4096
MAX_WORK = 1 << 27  # steps of all patterns in all tensors of a model, about a second
# Or this for each tensor, of models with many: names of all routers, or three patterns of what was
# left as it is, as checkpoints of models with experts have them.
TENSOR_WORK = 1 << 15
MAX_REPEATS = 8
MODULE = 64  # characters of a long module name


def names_of(section: ConfigReader, key: str) -> tuple[str, ...]:
    """A list of strings, empty when missing or null; patterns are checked. ConfigError."""
    value = section.values.get(key)
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MAX_NAMES:
        raise section.fail(key, f"must be a list of at most {MAX_NAMES} names")
    for one in value:
        if not isinstance(one, str) or len(one) > MAX_LENGTH:
            raise section.fail(key, "must be a list of names")
        if one.startswith(PATTERN):
            check_pattern(section, key, one.removeprefix(PATTERN))
    return tuple(value)


def check_pattern(section: ConfigReader, key: str, pattern: str) -> None:
    """ConfigError if it is no regular expression."""
    try:
        _compiled(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise section.fail(key, f"has a pattern that cannot be read ({error})") from None


def check_work(section: ConfigReader, num_tensors: int) -> None:
    """ConfigError if all patterns of the section may take too many steps, by an estimate from far
    above: a repetition tries each length, and alternatives multiply."""
    total, most = 0.0, max(MAX_WORK, TENSOR_WORK * num_tensors)
    for name in _names(section.values):
        total += _steps(name)
        if total * num_tensors > most:
            raise section.fail(
                "quant_method",
                f"stands beside names and patterns that take too many steps to compare with "
                f"{num_tensors} tensors (up to {name[:60]!r}); write fewer or simpler ones: "
                "without repeated groups, with at most two of * and + each",
            )


def _names(value: object) -> Iterator[str]:
    """Of modules: the texts in lists, and keys, which are some at `dynamic`."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield key
            yield from _names(one)
    elif isinstance(value, list):
        for one in value:
            yield from [one] if isinstance(one, str) else _names(one)


@cache
def _steps(pattern: str) -> float:
    """At most, to find that it does not fit a module's name."""
    bare = re.sub(r"\[[^\]]*\]", "x", re.sub(r"\\.", "x", pattern)).removesuffix("$")
    repeats = len(re.findall(r"[*+{]", bare.removesuffix(".*")))
    if repeats > MAX_REPEATS or re.search(r"\)[*+{]", bare):
        return math.inf
    bare = re.sub(r"\(\?|[*+}]\?", "(", bare)
    groups = [1 + part.count("|") for part in bare.split("(")]
    choices = math.prod(groups) << bare.count("?")
    return float(MODULE ** (1 + repeats) // math.factorial(repeats) * min(choices, MAX_WORK))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def matches(target: str, module: str) -> bool:
    """Its name, or a pattern behind "re:" that fits the beginning of it."""
    if target.startswith(PATTERN):
        return _compiled(target.removeprefix(PATTERN)).match(module) is not None
    return target == module


def is_kept_out(module: str, names: tuple[str, ...]) -> bool:
    """One of `modules_to_not_convert` means the module, by the rules of Transformers: a name or a
    pattern that fits its beginning up to a dot, or the end of it."""
    return module.endswith(names) or (bool(names) and _any_of(names).match(module) is not None)


@cache
def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """One pattern, as models with experts have many modules, and a list may name all routers."""
    every = [rf"(?:{name})(?:(?<=\.)|(?=\.|$))" for name in names]
    for name, one in zip(names, every, strict=True):
        try:
            _compiled(one)
            if re.search(r"\\\d|\(\?P", name):
                raise re.error("it refers to a part of itself")
        except re.error as error:
            raise ConfigError(
                f"config.json: quantization_config.modules_to_not_convert has {name[:60]!r}, which"
                f" cannot be read ({error}); write the module's name"
            ) from None
    return re.compile("|".join(every))
