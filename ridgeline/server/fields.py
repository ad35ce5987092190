"""Is each field of a request what it should be? Readers that name the field and its limit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sized

from ridgeline.server.declared import Declared
from ridgeline.server.errors import ApiError, quote

MAX_EXACT_FLOAT = 1 << 53


def check_text(text: str, param: str) -> str:
    """`text` itself. Refuses lone surrogates and NUL, which no tokenizer or log survives."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as fault:
        raise ApiError(
            "invalid_text", f"{param} has a lone surrogate at character {fault.start}", param
        ) from None
    if "\0" in text:
        raise ApiError("invalid_text", f"{param} has a NUL character", param)
    return text


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    names: dict[type, str] = {
        bool: "a boolean", int: "a number", float: "a number", str: "a string",
        list: "a list", dict: "an object",
    }  # fmt: skip
    return names.get(type(value), "null")


def wrong_type(param: str, wanted: str, value: object) -> ApiError:
    return ApiError("invalid_type", f"{param} must be {wanted}, not {kind_of(value)}", param)


class Fields:
    """The fields of one JSON object, as they were declared. null counts as absent, as the field's
    clients send it."""

    def __init__(self, values: Mapping[str, object], declared: Declared, path: str = "") -> None:
        self._values = values
        self._declared = declared
        self._path = path

    def at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def get(self, name: str) -> object:
        """The raw value, None when absent."""
        return self._values.get(name)

    def allow(self, more: Collection[str] = ()) -> None:
        """Refuse every name that is neither declared nor one of `more`."""
        for name in self._values:
            if name not in self._declared and name not in more:
                raise ApiError(
                    "unknown_parameter", f"unknown field {quote(name)}", self.at(check_name(name))
                )

    def require(self, name: str) -> object:
        value = self.get(name)
        if value is None:
            raise ApiError(
                "missing_required_parameter", f"{self.at(name)} is required", self.at(name)
            )
        return value

    def text(self, name: str) -> str | None:
        """As long as declared."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise wrong_type(self.at(name), "a string", value)
        low, high, _ = self._bounds(name)
        if len(value) > high:
            raise ApiError("invalid_value", f"{self.at(name)} is longer than {high}", self.at(name))
        if len(value) < low:
            is_required = self._declared[name].required
            code = "missing_required_parameter" if is_required else "invalid_value"
            raise ApiError(code, f"{self.at(name)} must not be empty", self.at(name))
        return check_text(value, self.at(name))

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_type(self.at(name), "true or false", value)
        return value

    def number(self, name: str) -> float | None:
        """Within the declared bounds."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool):
            raise ApiError(
                "invalid_value", f"{self.at(name)} must be a number, not a boolean", self.at(name)
            )
        if not isinstance(value, (int, float)):
            raise wrong_type(self.at(name), "a number", value)
        low, high, _ = self._bounds(name)
        if self._declared[name].above and value == low:
            raise ApiError("invalid_value", f"{self.at(name)} must be above {low:g}", self.at(name))
        if not low <= value <= high or not math.isfinite(value):
            raise self._out_of_range(name, f"{low:g} and {high:g}", "invalid_value")
        return value

    def integer(self, name: str) -> int | None:
        """Within the declared bounds."""
        value = self.get(name)
        if value is None:
            return None
        whole = self._whole(name, value)
        low, high, over = self._bounds(name)
        if not low <= whole <= high:
            code = over if whole > high else "invalid_value"
            raise self._out_of_range(name, f"{low} and {high}", code)
        return whole

    def nested(self, name: str) -> Fields | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise wrong_type(self.at(name), "an object", value)
        return Fields(value, self._declared[name].fields or {}, self.at(name))

    def items(self, name: str) -> list[object] | None:
        """As many as declared."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise wrong_type(self.at(name), "a list", value)
        if value is not None:
            self.check_count(name, value)
        return value

    def check_count(self, name: str, values: Sized) -> None:
        """Raises ApiError unless a list or an object has as many items as declared."""
        low, high, _ = self._bounds(name)
        if len(values) > high:
            raise ApiError("limit_exceeded", f"{self.at(name)} takes at most {high}", self.at(name))
        if len(values) < low:
            raise ApiError("empty_input", f"{self.at(name)} is empty", self.at(name))

    def _bounds(self, name: str) -> tuple[float, float, str]:
        field = self._declared[name]
        low = -math.inf if field.low is None else field.low
        return low, math.inf if field.high is None else field.high, field.over

    def _whole(self, name: str, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT_FLOAT:
            return int(value)  # some clients write every number with a point
        if isinstance(value, (bool, float)):
            raise ApiError("invalid_value", f"{self.at(name)} must be an integer", self.at(name))
        raise wrong_type(self.at(name), "an integer", value)

    def _out_of_range(self, name: str, limits: str, code: str) -> ApiError:
        return ApiError(code, f"{self.at(name)} must be between {limits}", self.at(name))


def check_name(name: str) -> str:
    """A field name fit to stand in an error: harmless characters only."""
    return "".join(c if c.isprintable() and c.isascii() else "?" for c in name)
