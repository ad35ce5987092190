r"""Which goals for speed on one H200 are reached? Makes the table of them from files of run.py.

    python3 bench/gpu/table.py --commit ID RESULTS.json [MORE.json ...] \
        [--out bench/gpu/results/latest.json] [--earlier bench/gpu/results/latest.json]

Writes rows {workload, metric, value, goal, stretch, vllm, date, device, commit} of all that was
measured and prints them as a Markdown table, misses in bold. Where two files (or two rows of one)
have the same figure, the later one counts. A workload that no file has keeps its row of the
`--earlier` table, date and commit of that time included. Rows measured under other conditions
than the goals' (lengths, number formats) are named on standard error and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Shapes of Llama-3.1-8B, Qwen3-0.6B, Qwen3-30B-A3B, and Mixtral-8x7B with 128,000 tokens.
MODELS = {"llama31-8b": "A", "qwen3-06b": "B", "qwen3-30b-a3b": "C", "mixtral-8x7b": "D"}
LATEST = Path(__file__).parent / "results" / "latest.json"
DECODE, LONG = (128, 256), (8192, 128)  # prompt and output tokens
MIXED, PREFIX, ONLINE = [256, 100, 1024], (64, 2048, 64, 64), (512, 128)
TOK_S = "tok/s"


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted of a workload. `goal` and `stretch` None: none was set."""

    workload: str
    metric: str
    vllm: float | None = None
    goal: float | None = None
    stretch: float | None = None


# "vllm" is vLLM 0.25.1 (its own defaults: CUDA graphs, torch.compile, FlashAttention 3,
# asynchronous scheduling) as measured on one H200 with the same workload file, random weights,
# random token ids and forced output lengths; the start of a process is "about a minute". fp8 is
# that of weights and activations, with the cache in bfloat16. The goals were set from these figures
# and from what the card can read (4.71 TB/s) and multiply.
GOALS = (
    Goal("A bf16 decode batch 1", TOK_S, 206, 266, 285),
    Goal("A bf16 decode batch 8", TOK_S, 1600, 2050, 2250),
    Goal("A bf16 decode batch 32", TOK_S, 5832, 7600, 8400),
    Goal("A bf16 decode batch 128", TOK_S, 17580, 22500, 26000),
    Goal("A bf16 decode batch 256", TOK_S, 23385, 30500, 34000),
    Goal("A bf16 batch 32 at 8k context", TOK_S, 2488, 2730, 2850),
    Goal("A fp8 decode batch 1", TOK_S, 286, 450, 500),
    Goal("A fp8 decode batch 32", TOK_S, 6985, 10500, 13000),
    Goal("A fp8 decode batch 256", TOK_S, 28377, 38000, 45000),
    Goal("A fp8 batch 32 at 8k context", TOK_S, 2682),
    Goal("A bf16 TTFT 512", "ms", 15.7, 12.5, 11),
    Goal("A bf16 TTFT 2048", "ms", 52.0, 48, 45),
    Goal("A bf16 TTFT 8192", "ms", 217.9, 205, 195),
    Goal("A fp8 TTFT 2048", "ms", 33.5),
    Goal("A mixed256 bf16", TOK_S, 9804, 11800, 12800),
    Goal("A mixed256 fp8", TOK_S, 11736, 15000, 17500),
    Goal("B bf16 decode batch 1", TOK_S, 616, 1430, 1800),
    Goal("B bf16 decode batch 8", TOK_S, 5098, 10500, 13500),
    Goal("B bf16 decode batch 32", TOK_S, 16617, 34000, 44000),
    Goal("B bf16 decode batch 128", TOK_S, 40322, 68000, 85000),
    Goal("B bf16 decode batch 256", TOK_S, 52221, 90000, 110000),
    Goal("B TTFT 512", "ms", 5.3, 3, 2),
    Goal("B TTFT 2048", "ms", 12.7, 7, 5),
    Goal("B mixed256", TOK_S, 23034, 31000, 35000),
    Goal("C bf16 decode batch 1", TOK_S, 242, 560),
    Goal("C bf16 decode batch 8", TOK_S, 902, 1200),
    Goal("C bf16 decode batch 32", TOK_S, 2019, 2450),
    Goal("C bf16 decode batch 128", TOK_S, 6867, 8300),
    Goal("C bf16 decode batch 256", TOK_S, 11900, 15500),
    Goal("C bf16 TTFT 512", "ms", 24.5, 14),
    Goal("C bf16 TTFT 2048", "ms", 53.7, 38),
    Goal("D bf16 decode batch 1", TOK_S, 122, 155),
    Goal("D bf16 decode batch 8", TOK_S, 363, 400),
    Goal("D bf16 decode batch 32", TOK_S, 1286, 1450),
    Goal("D bf16 decode batch 128", TOK_S, 4739, 5700),
    Goal("D bf16 decode batch 256", TOK_S, 7874, 9800),
    Goal("D bf16 TTFT 512", "ms", 44.8, 36),
    Goal("D bf16 TTFT 2048", "ms", 118.8, 98),
    Goal("A shared prefix cold", "s", 0.703, 0.60, 0.52),
    Goal("A server 32/s TTFT p99", "ms", 118.4, 80, 60),
    Goal("A server 32/s ITL p99", "ms", 34.9, 14, 10),
    Goal("A process start to first token", "s", 60, 12, 8),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table, measured or (value None) not yet."""

    workload: str
    metric: str
    value: float | None
    goal: float | None
    stretch: float | None
    vllm: float | None
    date: str
    device: str
    commit: str

    @property
    def reached(self) -> str | None:
        """stretch, yes or no; None without a goal or a value."""
        if self.value is None or self.goal is None:
            return None
        if self.stretch is not None and self.as_good_as(self.stretch):
            return "stretch"
        return "yes" if self.as_good_as(self.goal) else "no"

    def as_good_as(self, wanted: float) -> bool:
        """Rates are better when higher, times when lower."""
        if self.value is None:
            return False
        return self.value >= wanted if self.metric == TOK_S else self.value <= wanted


@dataclass(frozen=True, slots=True)
class Figure:
    workload: str
    metric: str
    value: float


class Unfit(ValueError):
    """A row that is not one of the table's workloads; the message says why."""


# ---------------------------------------------------------------------- from a file's rows


def figures(record: Mapping[str, Any], row: Mapping[str, Any]) -> list[Figure]:
    """What one row of a file says, under the table's names. Unfit if it is none of them."""
    if "error" in row:
        raise Unfit(f"failed: {row['error']}")
    model = MODELS.get(record["model"])
    if model is None:
        raise Unfit(f"model {record['model']} is none of {', '.join(MODELS)}")
    kind = str(row["workload"])
    if kind not in READERS:
        raise Unfit("the table has no such workload")
    late = cache_format(row) + (", first run" if row.get("label") == "cold" else "")
    if kind == "shared_prefix":
        late = cache_format(row)  # its "cold" is the cache of prefixes
    found = READERS[kind](model, weight_format(row), row)
    return [Figure(f.workload + late, f.metric, f.value) for f in found]


def weight_format(row: Mapping[str, Any]) -> str:
    if row.get("dtype", "bfloat16") != "bfloat16":
        raise Unfit(f"measured in {row['dtype']}")
    name = str(row.get("weight_format", "auto"))
    return "bf16" if name in ("auto", "plain") else name


def cache_format(row: Mapping[str, Any]) -> str:
    name = str(row.get("kv_cache_dtype", "auto"))
    return "" if name == "auto" else f", {name} cache"


def decode(model: str, weights: str, row: Mapping[str, Any]) -> list[Figure]:
    lengths = (row["prompt_len"], row["out_len"])
    if lengths not in (DECODE, LONG):
        raise Unfit(f"{lengths[0]} prompt and {lengths[1]} output tokens")
    if "decode_tok_s" not in row["median"]:
        raise Unfit("no steady decode window")
    batch = f"batch {row['batch']}"
    what = f"decode {batch}" if lengths == DECODE else f"{batch} at 8k context"
    return [Figure(f"{model} {weights} {what}", TOK_S, row["median"]["decode_tok_s"])]


def prefill(model: str, weights: str, row: Mapping[str, Any]) -> list[Figure]:
    name = f"{shape(model, weights)} TTFT {row['prompt_len']}"
    return [Figure(name, "ms", row["median"]["ttft_ms"])]


def shape(model: str, weights: str) -> str:
    """B is always in bf16 and mostly not said to be."""
    return model if (model, weights) == ("B", "bf16") else f"{model} {weights}"


def mixed(model: str, weights: str, row: Mapping[str, Any]) -> list[Figure]:
    if row.get("sizes", MIXED) != MIXED:
        raise Unfit(f"sizes {row['sizes']}")
    name = "B mixed256" if shape(model, weights) == "B" else f"{model} mixed256 {weights}"
    return [Figure(name, TOK_S, row["median"]["out_tok_s"])]


def prefix(model: str, weights: str, row: Mapping[str, Any]) -> list[Figure]:
    sizes = tuple(row[key] for key in ("n", "prefix", "unique", "out"))
    if sizes != PREFIX:
        raise Unfit(f"sizes {sizes}")
    return [Figure(f"{only(model, weights)} shared prefix cold", "s", row["median"]["wall_s"])]


def online(model: str, weights: str, row: Mapping[str, Any]) -> list[Figure]:
    if (row["prompt_len"], row["out_len"]) != ONLINE:
        raise Unfit(f"{row['prompt_len']} prompt and {row['out_len']} output tokens")
    if row["failed"]:
        raise Unfit(f"{row['failed']} of {row['n']} requests failed")
    name = f"{only(model, weights)} server {row['rate']:g}/s"
    return [
        Figure(f"{name} TTFT p99", "ms", row["ttft_ms_p99"]),
        Figure(f"{name} ITL p99", "ms", row["itl_ms_p99"]),
    ]


def start(model: str, weights: str, row: Mapping[str, Any]) -> list[Figure]:
    name = f"{only(model, weights)} process start to first token"
    return [Figure(name, "s", row["median"]["first_token_s"])]


def only(model: str, weights: str) -> str:
    """These workloads are bf16 without saying so."""
    return model if weights == "bf16" else f"{model} {weights}"


READERS = {
    "decode": decode,
    "prefill": prefill,
    "mixed256": mixed,
    "shared_prefix": prefix,
    "poisson_http": online,
    "start": start,
}


# ---------------------------------------------------------------------- the table


def lines(
    records: Iterable[tuple[str, Mapping[str, Any]]],
    commit: str,
    earlier: Iterable[Mapping[str, Any]] = (),
) -> list[Line]:
    """The goals in their order, then what else was measured. `records` are (name, content)."""
    goals = {(goal.workload, goal.metric): goal for goal in GOALS}
    found: dict[tuple[str, str], Line] = {}
    for name, record in records:
        for figure in readable(name, record):
            key = (figure.workload, figure.metric)
            goal = goals.get(key, Goal(*key))
            where = (str(record["date"]), str(record["device"]), commit)
            found[key] = make_line(goal, figure.value, where)
    for row in earlier:
        key = (str(row["workload"]), str(row["metric"]))
        if key not in found:
            where = (str(row["date"]), str(row["device"]), str(row["commit"]))
            found[key] = make_line(goals.get(key, Goal(*key)), float(row["value"]), where)
            print(f"{key[0]}: not measured now, of {where[2]}", file=sys.stderr)
    empty = ("", "", "")
    wanted = [found.pop(key, make_line(goal, None, empty)) for key, goal in goals.items()]
    return wanted + list(found.values())


def make_line(goal: Goal, value: float | None, where: tuple[str, str, str]) -> Line:
    return Line(goal.workload, goal.metric, value, goal.goal, goal.stretch, goal.vllm, *where)


def readable(name: str, record: Mapping[str, Any]) -> Iterator[Figure]:
    for row in record["rows"]:
        try:
            yield from figures(record, row)
        except Unfit as why:
            batch = f" batch {row['batch']}" if "batch" in row else ""
            print(f"{name}: left out {row['workload']}{batch}: {why}", file=sys.stderr)


def markdown(table: Sequence[Line]) -> str:
    """The table for people. Misses are bold, what was not measured is empty."""
    rows = ["| workload | value | goal | stretch | vLLM | reached |", "|---|---|---|---|---|---|"]
    for row in table:
        value, reached = quantity(row.value, row.metric), row.reached or ""
        if reached == "no":
            value, reached = f"**{value}**", "**no**"
        others = (quantity(v, "") for v in (row.goal, row.stretch, row.vllm))
        rows.append("| " + " | ".join((row.workload, value, *others, reached)) + " |")
    return "\n".join(rows)


def quantity(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:,.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text} {unit}".rstrip()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--commit", required=True, help="what was measured")
    parser.add_argument("--out", type=Path, default=LATEST)
    parser.add_argument("--earlier", type=Path, help="a table whose rows fill what is missing")
    args = parser.parse_args(argv)
    earlier = json.loads(args.earlier.read_text()) if args.earlier else ()
    records = ((p.name, json.loads(p.read_text())) for p in args.results)
    table = lines(records, args.commit, earlier)
    measured = [asdict(row) for row in table if row.value is not None]
    args.out.write_text(json.dumps(measured, indent=1) + "\n")
    print(markdown(table))


if __name__ == "__main__":
    main()
