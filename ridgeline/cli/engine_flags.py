"""Which flags shape the engine? One per field of EngineConfig, shared by all commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from typing import Any

from ridgeline import demo
from ridgeline.cli.parser import Parser
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.formats import ATTENTION_BACKENDS, KV_FORMATS, WEIGHT_FORMATS, read_speculate
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
    "policy": "which waiting request comes next; slo promises times and refuses to break them; "
    "fair shares the engine among API keys, or addresses where there are none; when not given, "
    "fair in a server with several keys, else fcfs",
    "ttft_slo_ms": "with --policy slo: milliseconds within which the first token is promised",
    "tpot_slo_ms": "with --policy slo: milliseconds promised per later token, on average",
    "max_in_flight": "2 plans the next step while one runs, 1 waits for each step's result",
    "enforce_eager": "launch the kernels of a decode step one by one, not as a captured CUDA graph",
    "warm_up": "auto captures the steps that can be foreseen before the first request, on a GPU: "
    "seconds, at most 90 where kernels must be compiled; off leaves it to whoever is first",
    "deterministic": "the same tokens whatever else is served: no kernel is chosen or cut by what "
    "else is in a step; slower, CUDA only",
    "speculate": "draft the next tokens and verify all of them in one step: the same answers, "
    "sooner while few are served. auto: the draft of a bundled model; off; ngram and suffix: what "
    "followed the same words before; draft:MODEL: a smaller model with the same tokens; "
    "eagle3:FOLDER: an EAGLE-3 head of the model; mtp: the model's own MTP module; early:N: "
    "the model's own first N layers. A number at the end (ngram:4) fixes how many are drafted, "
    "else as many as pay",
    "attention_backend": "the kernels of attention",
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
    "attention_backend": ("auto", *ATTENTION_BACKENDS),
    "weight_format": ("auto", *(name for name, line in WEIGHT_FORMATS.items() if line.where)),
    "kv_cache_dtype": tuple(name for name, line in KV_FORMATS.items() if line.where),
}
PATHS = {"calibration": "FILE", "event_log": "FILE", "tokenizer": "DIR"}  # shells complete these
MOST_IN_A_ROW = 4  # choices; more of them are told in the help
COMMON = (
    "device",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "memory_utilization",
    "speculate",
    "weight_format",
    "kv_cache_dtype",
    "threads",
)

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
    """What --speculate takes. Synthetic drafts change the answers, so they are for benchmarks."""
    try:
        asked = None if text == "auto" else read_speculate(text)
    except ConfigError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    if asked is not None and not asked.line.is_served:
        raise argparse.ArgumentTypeError(
            f"{asked.method} drafts are right whatever the model says: only "
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


def add_model(parser: Parser, *, takes_names: bool = False) -> None:
    """MODEL, which may be left out: then it is the bundled model for chats. `takes_names`: the
    command needs no weights, so a public model's name will do."""
    bundled = ", ".join(demo.PREFIX + name for name in demo.NAMES)
    named = "a public model's name (ridgeline inspect --list), " if takes_names else ""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=demo.DEFAULT,
        help=f"a folder, a .gguf file, {named}a hub id user/name[@revision], or a bundled model: "
        f"{bundled} (default: %(default)s)",
    )


def add_engine_flags(parser: Parser, without: Collection[str] = ()) -> None:
    """Add MODEL and the engine's flags. What is not given stays with EngineConfig's default."""
    add_model(parser)
    group = parser.add_argument_group("engine")
    for field in engine_fields():
        if field.name not in without:
            action = _add(group, field)
            if field.name not in COMMON:
                parser.mark_expert(*action.option_strings)


def _add(group: argparse._ArgumentGroup, field: Field[Any]) -> argparse.Action:
    dest, flag = _dest(field.name), field.name.replace("_", "-")
    if field.type == "bool":
        return group.add_argument(
            f"--no-{flag}" if field.default else f"--{flag}",
            dest=dest,
            action="store_false" if field.default else "store_true",
            default=argparse.SUPPRESS,
            help=HELP[field.name],
        )
    default = "" if field.default is None else f" (default: {field.default})"
    choices = CHOICES.get(field.name)
    is_long = choices is None or len(choices) > MOST_IN_A_ROW
    return group.add_argument(
        f"--{flag}",
        dest=dest,
        type=_kind(field),
        choices=choices,
        default=argparse.SUPPRESS,
        metavar=PATHS.get(field.name, field.name.split("_")[-1].upper()) if is_long else None,
        help=HELP[field.name]
        + (f": {', '.join(choices)}" if choices and is_long else "")
        + default,
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that were given on the command line, `model` not among them."""
    return {
        field.name: getattr(args, _dest(field.name))
        for field in engine_fields()
        if hasattr(args, _dest(field.name))
    }
