"""Can what was asked for be had on this machine? All that can be said before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from ridgeline import demo
from ridgeline.architectures.spec import TRANSFORMERS
from ridgeline.config import DEFAULT_POLICY, EngineConfig, check_device, check_numbers
from ridgeline.cost.setup import Layout
from ridgeline.errors import ConfigError
from ridgeline.formats import (
    COLLECTIVES,
    KV_FORMATS,
    MODEL,
    WEIGHT_FORMATS,
    check_served,
    read_speculate,
)
from ridgeline.scheduler.policies import check_promise


def check_settings(config: EngineConfig) -> None:
    """Numbers and names; ConfigError says which is wrong."""
    check_numbers(config)
    check_device(config.device)
    check_threads(config.threads)
    if config.weight_format != "auto":
        check_served(WEIGHT_FORMATS, config.weight_format, "weight_format")
    check_served(KV_FORMATS, config.kv_cache_dtype, "kv_cache_dtype")
    check_ranks(config)
    policy = config.policy or DEFAULT_POLICY
    check_promise(policy, config.ttft_slo_ms, config.tpot_slo_ms)
    if config.max_num_mixed_tokens is not None and config.tpot_slo_ms is not None:
        raise ConfigError(
            f"policy {policy} bounds steps by tpot_slo_ms; leave out max_num_mixed_tokens"
        )


def check_ranks(config: EngineConfig) -> None:
    """What of tp, pp, ep, dp, launcher and join_address does not go together."""
    joins, address = config.launcher == "join", config.join_address
    more = [(name, n) for name, n in (("pp", config.pp), ("dp", config.dp)) if n > 1]
    shape = " and ".join(f"{name} {n}" for name, n in (("tp", config.tp), *more))
    is_group = config.num_ranks > 1
    Layout(tp=config.tp, ep=config.ep, dp=config.dp)
    if config.dp > 1 and config.pp > 1:
        raise ConfigError(
            f"dp {config.dp} and pp {config.pp} are not served together yet; use dp 1 or pp 1"
        )
    if config.launcher not in ("auto", "local") and not is_group:
        raise ConfigError(
            f"launcher {config.launcher} is for other ranks, and tp 1 has none; give tp 2 or more,"
            " or leave it out"
        )
    if joins != (address is not None):
        raise ConfigError(
            "launcher join needs join_address, the HOST:PORT where this machine waits for the "
            "other ranks, and nothing else does; give both or none"
        )
    if address is not None:
        read_address(address)
    if config.collective not in ("auto", *COLLECTIVES):
        names = ", ".join(COLLECTIVES)
        raise ConfigError(f"unknown collective {config.collective!r}; use auto or one of {names}")
    if is_group and config.implementation == TRANSFORMERS:
        raise ConfigError(f"{shape} needs native layers; leave out implementation")
    if is_group and config.device.startswith("cuda:"):
        raise ConfigError(
            f"device {config.device} is one GPU and {shape} is more; use device cuda, which takes"
            " the first ones, or choose them with CUDA_VISIBLE_DEVICES"
        )


def read_address(text: str) -> tuple[str, int]:
    """HOST:PORT, the host perhaps in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is no address; write HOST:PORT, such as 192.0.2.7:7070")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_asked(config: EngineConfig) -> None:
    """Settings, and the files and models that they name. Nothing is made or fetched."""
    check_settings(config)
    check_model(config.model)
    asked = None if config.speculate == "auto" else read_speculate(config.speculate)
    if asked is not None and asked.line.argument == MODEL:
        check_model(asked.argument)
    if config.tokenizer is not None:
        from ridgeline.text.tokenizer import named_tokenizer

        named_tokenizer(config.tokenizer)
    if config.calibration is not None:
        from ridgeline.records import read_record

        read_record(Path(config.calibration))
    if config.event_log is not None:
        check_writable("event_log", Path(config.event_log))


def check_model(model: str) -> None:
    """ConfigError for a name that is no bundled model, nothing here, and no hub id either."""
    from ridgeline.loader.hub import check_name

    check_name(demo.located(model))


def check_threads(threads: int | None) -> None:
    """More threads than the machine has only wait for each other, and very many crash it."""
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise ConfigError(
            f"threads is {threads}; this machine runs {cores} at once: give at most {cores}, or "
            "leave it out"
        )


def check_writable(flag: str, path: Path) -> None:
    """Before minutes are spent on what would be in the file: ConfigError when it cannot be written.
    Leaves all as it was."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_file():
        return  # a pipe: whoever reads it would take a closed one for its end
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot be written ({error.strerror}); name another file"
        ) from None
