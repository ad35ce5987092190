"""JSON schemas at random, whose shortest answers are short."""

from __future__ import annotations

import json
from random import Random
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "age", "a b", 'q"t', "été", "x_1", "kind", "size", "id", "on")
PATTERNS = ("[a-z]{2,6}", "[0-9]{3}-[0-9]{2}", "(red|green) [A-F]{1,3}", "a?b{2}[^x]{0,2}")
# Without "time": llguidance takes a leap second in every minute, validators one at a day's end.
FORMATS = ("date", "uuid", "ipv4")


def random_schema(random: Random, depth: int = 3) -> Schema:
    """Values of it have at most a few hundred characters beside spaces."""
    kinds = [_text, _integer, _number, _choice, _simple]
    if depth:
        kinds += [_object, _object, _array, _either]
    schema = random.choice(kinds)(random, depth)
    if depth == 3 and random.random() < 0.2:  # by a reference
        return {"$ref": "#/$defs/it", "$defs": {"it": schema}}
    return schema


def _text(random: Random, depth: int) -> Schema:
    kind = random.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": f"^{random.choice(PATTERNS)}$"}
    if kind == 1:
        return {"type": "string", "format": random.choice(FORMATS)}
    low = random.randrange(3)
    return {"type": "string", "minLength": low, "maxLength": low + random.randrange(1, 9)}


def _integer(random: Random, depth: int) -> Schema:
    low = random.randrange(-500, 500)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + random.randrange(1000)}
    if random.random() < 0.2:
        return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 7}
    if random.random() < 0.3:
        schema["exclusiveMaximum"] = schema.pop("maximum") + 1
    return schema


def _number(random: Random, depth: int) -> Schema:
    low = random.randrange(-50, 50) / 4
    return {"type": "number", "minimum": low, "maximum": low + random.randrange(1, 20)}


def _choice(random: Random, depth: int) -> Schema:
    values = ["a", "Ω", 1, -2.5, None, True, [1, "b"], {"k": 0}, random.choice(WORDS)]
    some = random.sample(values, random.randrange(1, 5))
    return {"enum": some} if len(some) > 1 else {"const": some[0]}


def _simple(random: Random, depth: int) -> Schema:
    return {"type": random.choice((["boolean", "null"], "boolean", "null"))}


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(WORDS, random.randrange(1, 5))
    required = [name for name in names if random.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: random_schema(random, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(random: Random, depth: int) -> Schema:
    if random.random() < 0.3:
        items = [random_schema(random, depth - 1) for _ in range(random.randrange(1, 4))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    low = random.randrange(2)
    return {
        "type": "array",
        "items": random_schema(random, depth - 1),
        "minItems": low,
        "maxItems": low + random.randrange(1, 3),
    }


def _either(random: Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(random, depth - 1) for _ in range(2)]}


def is_valid(schema: Schema, text: str) -> bool:
    """By a validator that has nothing to do with how `text` was made."""
    import jsonschema_rs

    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    return bool(validator.is_valid(json.loads(text)))
