"""Does a target or an exception of a quantization_config mean this module?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.stored import Stored
from ridgeline.errors import ConfigError

Find = Callable[[str], Stored | None]  # module name -> how its matrix is stored
PATTERN = "re:"
MAX_NAMES, MAX_LENGTH = 1 << 16, 1 << 14


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
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise section.fail(key, f"has a pattern that cannot be read ({error})") from None


def matches(target: str, module: str) -> bool:
    """Its name, or a pattern behind "re:" that fits the beginning of it."""
    if target.startswith(PATTERN):
        return re.match(target.removeprefix(PATTERN), module) is not None
    return target == module


def is_kept_out(module: str, names: Iterable[str]) -> bool:
    """One of `modules_to_not_convert` means the module, by the rules of Transformers: a name or a
    pattern that fits its beginning up to a dot, or the end of it."""
    for name in names:
        if module.endswith(name):
            return True
        try:
            if re.match(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", module):
                return True
        except re.error as error:
            raise ConfigError(
                f"config.json: quantization_config.modules_to_not_convert has {name[:60]!r}, which"
                f" cannot be read ({error}); write the module's name"
            ) from None
    return False
