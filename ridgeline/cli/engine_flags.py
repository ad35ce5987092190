"""Which flags shape the engine? One per field of EngineConfig, shared by all commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from typing import Any

from ridgeline import demo
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.formats import read_speculate
from ridgeline.scheduler.policies import POLICIES

HELP = {
    "tokenizer": "folder of the tokenizer, where it is not the model's own",
    "device": "auto, cpu, cuda or cuda:N",
    "dtype": "number format of weights, cache and arithmetic; auto takes the checkpoint's own "
    "(float32 for float16 checkpoints on a CPU)",
    "load_format": "auto reads *.safetensors; random draws weights from --seed, for trying speed",
    "seed": "seed of random weights and of unseeded requests",
    "max_model_len": "longest prompt plus answer, in tokens; smaller leaves room for more requests",
    "block_size": "tokens in one block of the KV cache",
    "num_blocks": "blocks of the KV cache, instead of a memory size",
    "kv_cache_memory_bytes": "memory of the KV cache, such as 512MiB or 4GB; beats "
    "--memory-utilization",
    "memory_utilization": "share of the device's memory for weights, cache and working space",
    "max_num_seqs": "most requests that run at the same time; auto by device",
    "max_num_batched_tokens": "most tokens computed in one step; smaller steps disturb running "
    "answers less, larger ones read prompts faster",
    "max_num_mixed_tokens": "most tokens of a step in which prompts join answers that go on, more "
    "where many prompts wait: smaller makes answers steadier and first tokens later; when not "
    "given, on a GPU about as few as are read at nine tenths of the full rate, on a CPU no bound",
    "prefix_caching": "do not reuse the cache of a prompt's beginning that was seen before",
    "policy": "which waiting request comes next; slo promises times and refuses to break them",
    "ttft_slo_ms": "with --policy slo: milliseconds within which the first token is promised",
    "tpot_slo_ms": "with --policy slo: milliseconds promised per later token, on average",
    "max_in_flight": "2 plans the next step while one runs, 1 waits for each step's result",
    "enforce_eager": "launch the kernels of a decode step one by one, not as a captured CUDA graph",
    "warm_up": "auto captures the steps that can be foreseen before the first request, on a GPU: "
    "seconds, at most 90 where kernels must be compiled; off leaves it to whoever is first",
    "deterministic": "the same tokens whatever else is served: no kernel is chosen or cut by what "
    "else is in a step; slower, CUDA only",
    "speculate": "guess the next tokens and check all of them in one step: the same answers, "
    "sooner while few are served. ngram and suffix look up what followed the same words before "
    "(good where answers repeat their prompt), draft:MODEL asks a smaller model with the same "
    "tokens, early:N the model's own first N layers; a number behind it, as in ngram:4, fixes how "
    "many are guessed, which else follows from how many are right and what checking costs. auto "
    "takes the draft that comes with a bundled model",
    "attention_backend": "auto, or a backend by name",
    "weight_format": "how weights are kept in memory; auto keeps the checkpoint's numbers",
    "kv_cache_dtype": "how cached keys and values are kept; auto is the dtype of the arithmetic",
    "pack_cache": "on a CPU, weights in the order of the kernels are kept on disk, so that the "
    "next start is quick; clear removes those of all models first",
    "threads": "CPU threads for arithmetic; when not given, one for each 16 MiB of weights, "
    "at most all cores",
    "calibration": "file of constants measured by ridgeline calibrate, instead of those kept for "
    "this device; what steps should cost is worked out from them",
    "event_log": "append every event of the engine to this file, for `ridgeline explain` and for "
    "replays: token ids of prompts and answers are in it, their text is not",
}

CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "load_format": ("auto", "safetensors", "random"),
    "max_in_flight": (1, 2),
    "warm_up": ("auto", "off"),
    "pack_cache": ("auto", "off", "clear"),
    "policy": tuple(sorted(POLICIES)),
}

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def byte_size(text: str) -> int:
    """Bytes of "4GiB", "500MB" or "1048576" (decimal units are powers of 1000)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = match and next((u for u in _UNITS if u.lower() == match[2].lower()), None)
    if not match or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512MiB, 4GB or bytes")
    return int(float(match[1]) * _UNITS[unit])


def speculation(text: str) -> str:
    """What --speculate takes. Synthetic guesses change the answers, so they are for benchmarks."""
    try:
        asked = None if text == "auto" else read_speculate(text)
    except ConfigError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    if asked is not None and not asked.line.is_served:
        raise argparse.ArgumentTypeError(
            f"{asked.method} guesses are right whatever the model says: only "
            "EngineConfig takes them, to measure the engine"
        )
    return text


def _kind(field: Field[Any]) -> Callable[[str], object]:
    if field.name == "kv_cache_memory_bytes":
        return byte_size
    if field.name == "speculate":
        return speculation
    return {"int": int, "float": float, "str": str}[str(field.type).partition(" ")[0]]


def _dest(name: str) -> str:
    return f"engine_{name}"


def engine_fields() -> tuple[Field[Any], ...]:
    """The fields that have a flag: all but the model itself, which is an argument."""
    return tuple(field for field in fields(EngineConfig) if field.name != "model")


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, which may be left out: then it is the bundled model for chats."""
    bundled = ", ".join(demo.PREFIX + name for name in demo.NAMES)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=demo.DEFAULT,
        help="a folder, a .gguf file, a hub id user/name[@revision], or a bundled model: "
        f"{bundled} (default: %(default)s)",
    )


def add_engine_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add MODEL and the engine's flags. What is not given stays with EngineConfig's default."""
    add_model(parser)
    group = parser.add_argument_group("engine")
    for field in engine_fields():
        if field.name not in without:
            _add(group, field)


def _add(group: argparse._ArgumentGroup, field: Field[Any]) -> None:
    dest, flag = _dest(field.name), field.name.replace("_", "-")
    if field.type == "bool":
        group.add_argument(
            f"--no-{flag}" if field.default else f"--{flag}",
            dest=dest,
            action="store_false" if field.default else "store_true",
            default=argparse.SUPPRESS,
            help=HELP[field.name],
        )
        return
    default = "" if field.default is None else f" (default: {field.default})"
    choices = CHOICES.get(field.name)
    group.add_argument(
        f"--{flag}",
        dest=dest,
        type=_kind(field),
        choices=choices,
        default=argparse.SUPPRESS,
        metavar=None if choices else field.name.split("_")[-1].upper(),
        help=HELP[field.name] + default,
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that were given on the command line, `model` not among them."""
    return {
        field.name: getattr(args, _dest(field.name))
        for field in engine_fields()
        if hasattr(args, _dest(field.name))
    }
