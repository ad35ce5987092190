"""What does this key of a config.json say? Typed, bounded reading; every error names its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.errors import ConfigError

# Far above every known model, far below what would exhaust a host before an error is seen.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_VOCAB = 1 << 24
MAX_POSITIONS = 1 << 27
MAX_TENSORS = 1 << 18  # Kimi-K2 with 4 bits has 208,000: words, scale and shape of each matrix
MAX_IDS = 1024


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """One JSON object of a config. `path` is what stands before the key in messages, `source` the
    file that it is from."""

    values: Mapping[str, object]
    path: str = ""
    source: str = "config.json"

    def fail(self, key: str, reason: str) -> ConfigError:
        """The error for `key`, to be raised by the caller."""
        return ConfigError(f"{self.source}: {self.path}{key[:80]} {reason}")

    def without(self, *keys: str) -> ConfigReader:
        """The same object, as if it had none of these."""
        left = {key: value for key, value in self.values.items() if key not in keys}
        return ConfigReader(left, self.path, self.source)

    def with_defaults(self, **values: object) -> ConfigReader:
        """The same object, with these where it says nothing."""
        return ConfigReader({**values, **self.values}, self.path, self.source)

    def with_values(self, **values: object) -> ConfigReader:
        """The same object, with these whatever it says."""
        return ConfigReader({**self.values, **values}, self.path, self.source)

    def has(self, key: str) -> bool:
        """The key is there and not null."""
        return self.values.get(key) is not None

    def integer(
        self, key: str, *, low: int = 1, high: int = MAX_WIDTH, default: int | None = None
    ) -> int:
        """An integer in [low, high]. Missing or null: `default`, or an error without one."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, f"is missing (an integer from {low} to {high})")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be an integer, not {_show(value)}")
        if not low <= value <= high:
            raise self.fail(key, f"is {_show(value)}; it must be from {low} to {high}")
        return value

    def number(self, key: str, *, default: float | None, low: float, high: float) -> float:
        """A finite number in [low, high]. Missing or null: `default`, or an error without one."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, f"is missing (a number from {low:g} to {high:g})")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"must be a number, not {_show(value)}")
        if not low <= value <= high:  # true of NaN
            raise self.fail(key, f"is {_show(value)}; it must be from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean. Missing or null: `default`."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {_show(value)}")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """A string. Missing or null: `default`, or an error without one."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing (a string)")
            return default
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, not {_show(value)}")
        return value

    def section(self, key: str) -> ConfigReader | None:
        """A nested object, None when missing, null or empty."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(key, f"must be an object, not {_show(value)}")
        return ConfigReader(value, f"{self.path}{key[:80]}.", self.source) if value else None

    def texts(self, key: str, *, length: int) -> tuple[str, ...] | None:
        """A list of `length` strings, None when missing or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.fail(key, f"must be a list of strings, not {_show(value)}")
        if len(value) != length:
            raise self.fail(key, f"has {len(value)} entries; it must have {length}")
        if not all(isinstance(entry, str) for entry in value):
            raise self.fail(key, "must be a list of strings")
        return tuple(value)

    def numbers(self, key: str, *, length: int, low: float, high: float) -> tuple[float, ...]:
        """A list of `length` finite numbers in [low, high]."""
        value = self.values.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.fail(key, f"must be a list of {length} numbers, not {_show(value)}")
        if len(value) != length:
            raise self.fail(key, f"has {len(value)} entries; it must have {length}")
        for entry in value:
            is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
            if not is_number or not low <= entry <= high:
                raise self.fail(key, f"has {_show(entry)}, no number from {low:g} to {high:g}")
        return tuple(float(entry) for entry in value)

    def flags(self, key: str, *, length: int) -> tuple[bool, ...] | None:
        """A list of `length` times 0 or 1, None when missing or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(one in (0, 1) for one in value):
            raise self.fail(key, f"must be a list of 0 and 1, not {_show(value)}")
        if len(value) != length:
            raise self.fail(key, f"has {len(value)} entries; it must have {length}")
        return tuple(bool(one) for one in value)

    def token_ids(self, key: str, *, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids inside the vocabulary; empty when missing or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        entries = value if isinstance(value, list) else [value]
        if len(entries) > MAX_IDS:
            raise self.fail(key, f"has {len(entries)} entries; at most {MAX_IDS} are read")
        for entry in entries:
            if isinstance(entry, bool) or not isinstance(entry, int):
                raise self.fail(key, f"must be token ids, not {_show(value)}")
            if not 0 <= entry < vocab_size:
                raise self.fail(key, f"has {_show(entry)}, outside 0 .. {vocab_size - 1}")
        return tuple(entries)

    def refuse(self, key: str, *harmless: object) -> None:
        """ConfigError if the key is there with a value other than null or the harmless ones."""
        value = self.values.get(key)
        if value is not None and value not in harmless:
            raise self.fail(key, f"is {_show(value)}, which this model family does not support")


def _show(value: object) -> str:
    text = repr(value[:60] if isinstance(value, (list, str)) else value)
    return text if len(text) <= 60 else text[:57] + "..."
