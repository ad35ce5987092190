"""Which numbers does the server refuse before it starts anything?"""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from ridgeline.config import EngineConfig
from ridgeline.declared import declared
from ridgeline.errors import ConfigError
from ridgeline.server.config import Limits, ServeConfig, check_serve_numbers

CONFIG = ServeConfig(engine=EngineConfig(model="m"))
RANGES = {name: (field.low, field.high) for name, field in declared(Limits).items()}


def limited(name: str, value: Any) -> ServeConfig:
    return replace(CONFIG, limits=replace(Limits(), **{name: value}))


def test_every_limit_has_a_range_of_its_own_kind() -> None:
    for name, field in declared(Limits).items():
        assert field.low is not None, name
        assert field.high is not None, name
        kind: type = {"integer": int, "number": float}[field.kind]
        assert type(field.unset) is kind, name
    check_serve_numbers(CONFIG)


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_a_range_are_in_it(name: str) -> None:
    least, most = RANGES[name]
    assert least is not None
    assert most is not None
    for end in (least, most):
        check_serve_numbers(limited(name, end))
    for value in (least - 1, -1, most * 2, math.nan, math.inf, -math.inf, "1", None):
        with pytest.raises(ConfigError, match=f"^{name} is .*; it must be ") as caught:
            check_serve_numbers(limited(name, value))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_body_bytes", 0),
        ("max_header_bytes", 0),
        ("max_sequences_per_request", 0),
        ("tokenizer_processes", 0),
        ("max_queued_cache_fills", 0.0),
        ("queue_timeout_s", 0.0),
        ("run_timeout_s", 0.0),
        ("step_kill_s", 0.0),
        ("tokenizer_processes", 1.5),
    ],
)
def test_limits_that_would_refuse_or_kill_everything(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        check_serve_numbers(limited(name, value))


def test_what_zero_stands_for_is_kept() -> None:
    for name in ("max_queued_sequences", "max_engine_restarts", "idle_connection_timeout_s"):
        check_serve_numbers(limited(name, 0))
    for name in ("drain_s", "step_overdue_s"):
        check_serve_numbers(limited(name, 0))
    check_serve_numbers(replace(CONFIG, port=0, price_per_hour=0.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"port": 65536}, "port is 65536; it must be from 0 to 65535"),
        ({"port": -1}, "port is -1; it must be from 0 to 65535"),
        ({"port": 80.5}, "port is 80.5; it must be a whole number"),
        ({"port": "80"}, "port is '80'; it must be a whole number"),
        ({"price_per_hour": -3.0}, "price_per_hour is -3.0; it must be from 0 to 1e\\+12"),
        ({"price_per_hour": math.nan}, "price_per_hour is nan"),
        ({"engine": EngineConfig(model="m", threads=0)}, "threads is 0; it must be at least 1"),
        ({"engine": EngineConfig(model="m", memory_utilization=math.nan)}, "memory_utilization"),
    ],
)
def test_the_other_numbers(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_serve_numbers(replace(CONFIG, **change))
