"""`ridgeline bench`: how fast is this model here, and what holds it back?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.asked import check_writable
from ridgeline.cli.parser import Parser, add_json_flag
from ridgeline.cli.session import add_session_flags, note, open_llm, stage
from ridgeline.cli.tables import Column, amount, answer, grid, places, table
from ridgeline.cli.values import above_zero, names, numbers, positive
from ridgeline.errors import ConfigError
from ridgeline.figures import fixed, percent, scaled

if TYPE_CHECKING:
    from rich.table import Table

    from ridgeline.benchmark.compare import BatchingResult, CachingResult
    from ridgeline.benchmark.speed import Bench, LoadResult, SplitResult
    from ridgeline.llm import LLM
    from ridgeline.observe.run_summary import RunSummary

WORKLOADS = ("decode", "prefill", "split", "mixed", "serving")
EXAMPLES = """workloads (--workload, several with commas):
  decode    steps of --batch requests at once: time, tokens/s, bytes/s against the read bandwidth
  prefill   one prompt alone: time to first token
  split     where the time of one request goes: prompt (1024 tokens) and answer (512)
  mixed     many requests of mixed lengths, all at once
  serving   requests at random times (Poisson), in this process or against a server (--url)

Lengths that exceed the model's context are scaled down, and the result says so.

examples:
  ridgeline bench                                            the bundled model
  ridgeline bench path/to/model                              decode, prefill and split
  ridgeline bench path/to/model --workload decode --batch 1,8,32
  ridgeline bench path/to/model --compare uncached,cached,paged    what the KV cache buys
  ridgeline bench path/to/model --continuous-vs-static       what continuous batching buys
  ridgeline bench path/to/model --workload serving --rate 8 --url http://127.0.0.1:8000
  ridgeline bench path/to/model --json --output result.json
"""


def add_arguments(parser: Parser) -> None:
    flag = parser.flags("what to measure")
    flag("--workload NAMES", "default: decode,prefill,split", names)
    flag("--compare MODES", "uncached, cached, paged: one answer each", names)
    flag("--continuous-vs-static", "answers of very different lengths")
    flag("--batch N,N", "for decode", numbers, default=(1, 8))
    flag("--prompt-len N", "prompt tokens", positive)
    flag("--output-len N", "answer tokens", positive)
    flag("--num-requests N", "for mixed and serving", positive)
    flag("--rate R", "arrivals per second (default: 4)", above_zero, default=4.0)
    flag("--slots", "places for the batching compare", positive, default=16)
    flag("--repeats N", "default: 3", positive, default=3)
    flag("--url URL", "serving: a running server, instead of an engine in here")
    flag("--served-model-name NAME", "what --url calls the model")
    flag("--api-key-file FILE", "holds the key that --url wants")
    add_json_flag(flag)
    flag("--output FILE", "write the JSON here as well")
    parser.mark_expert("--slots", "--repeats", "--served-model-name", "--api-key-file")
    add_session_flags(parser)


@dataclass(slots=True)
class Report:
    """All results by section, and what they were measured on."""

    about: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, section: str, result: object) -> None:
        self.sections.setdefault(section, []).append(result)

    def as_json(self) -> dict[str, Any]:
        results = {name: [record(r) for r in rows] for name, rows in self.sections.items()}
        return {**self.about, "results": results}


def record(result: Any) -> dict[str, Any]:
    """A dataclass as a dict, its properties included."""
    derived = [name for name, value in vars(type(result)).items() if isinstance(value, property)]
    return {**asdict(result), **{name: getattr(result, name) for name in derived}}


def run(args: argparse.Namespace) -> int:
    _check(args)
    report = Report()
    if args.url:
        _measure_server(args, report)
    else:
        _measure_here(args, report)
    problem = _write(args, json.dumps(report.as_json(), indent=2)) if args.output else None
    answer(args, report.as_json, lambda: shown(report))
    if problem is not None:  # said last: what was measured has been shown all the same
        raise problem
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.workload is None:
        comparing = args.compare or args.continuous_vs_static
        args.workload = () if comparing else ("serving",) if args.url else WORKLOADS[:3]
    for name in args.workload:
        if name not in WORKLOADS:
            raise ConfigError(f"--workload: unknown {name!r}; choose among {', '.join(WORKLOADS)}")
    if args.compare:
        from ridgeline.benchmark.compare import check_modes

        check_modes(args.compare)
    if args.url and (args.workload != ("serving",) or args.compare or args.continuous_vs_static):
        raise ConfigError("--url measures the serving workload only")
    if args.output:
        check_writable("--output", Path(args.output))


def _write(args: argparse.Namespace, text: str) -> ConfigError | None:
    """Why it could not be written, if so."""
    try:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        return ConfigError(f"--output {args.output}: {error.strerror}; the result was not written")
    note(args, f"written to {args.output}")
    return None


# ---------------------------------------------------------------------- in this process


def _measure_here(args: argparse.Namespace, report: Report) -> None:
    if args.workload:
        with open_llm(args) as llm:
            _workloads(args, report, llm)
    if args.compare:
        _compare(args, report)
    if args.continuous_vs_static:
        _batching(args, report)


def _workloads(args: argparse.Namespace, report: Report, llm: LLM) -> None:
    from ridgeline.benchmark.speed import Bench
    from ridgeline.observe.run_summary import run_summary, snapshot

    _describe(args, report, llm)
    bench = Bench(
        llm, report.about["bandwidth"]["read_bytes_per_s"], args.repeats, llm.resolved.seed
    )
    run_record, costs = llm.run_record, []
    for name in args.workload:
        before = snapshot(run_record.totals)
        for what, measure in _work(name, args, bench):
            with stage(args, what):
                result = measure()
            report.add(name, result)
            if name == "prefill" and result.note:
                break  # longer prompts would be cut to the same length
        costs.append(run_summary(name, run_record.pricer, run_record.totals, before))
    for cost in costs:
        report.add("cost", cost)


def _describe(args: argparse.Namespace, report: Report, llm: LLM) -> None:
    """Fill `about` once: where this runs, which model it is, how fast the memory is."""
    if report.about:
        return
    import torch

    from ridgeline.architectures.counts import num_parameters
    from ridgeline.benchmark.environment import environment
    from ridgeline.measure.machine import measure_bandwidth

    device = torch.device(llm.resolved.device)
    resolved = asdict(llm.resolved)
    resolved.pop("decisions")
    resolved.pop("model_path")
    with stage(args, "measuring the memory's read bandwidth"):
        bandwidth = measure_bandwidth(device)
    report.about = {
        "environment": asdict(environment(device)),
        "model": {"family": llm.spec.family, "parameters": num_parameters(llm.spec), **resolved},
        "bandwidth": asdict(bandwidth),
    }


def _work(
    name: str, args: argparse.Namespace, bench: Bench
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What the workload measures, in words, and how."""
    if name == "decode":
        lengths = args.prompt_len or 128, args.output_len or 128
        for batch in args.batch:
            yield f"decode, batch {batch}", partial(bench.decode, batch, *lengths)
    elif name == "prefill":
        for length in (args.prompt_len,) if args.prompt_len else (512, 2048):
            yield f"prefill, {length} tokens", partial(bench.prefill, length)
    elif name == "split":
        lengths = args.prompt_len or 1024, args.output_len or 512
        yield "split of one request", partial(bench.split, *lengths)
    elif name == "mixed":
        yield "mixed lengths", partial(bench.mixed, args.num_requests or 64, 100, 1024)
    else:
        load = args.num_requests or 64, args.rate, args.prompt_len or 512, args.output_len or 128
        yield f"serving {args.rate:g} requests a second", partial(bench.serving, *load)


def _compare(args: argparse.Namespace, report: Report) -> None:
    from ridgeline.benchmark.compare import compare_caching

    @contextmanager
    def opener(**options: Any) -> Iterator[LLM]:
        with open_llm(args, **options) as llm:
            _describe(args, report, llm)
            yield llm

    with stage(args, "comparing uncached, cached and paged"):
        results = compare_caching(
            opener,
            args.compare,
            prompt_len=args.prompt_len or 256,
            output_len=args.output_len or 128,
            crowd=args.num_requests or 32,
            seed=0,
        )
    for result in results:
        report.add("caching", result)


def _batching(args: argparse.Namespace, report: Report) -> None:
    from ridgeline.benchmark.compare import compare_batching

    with open_llm(args, max_num_seqs=args.slots) as llm:
        _describe(args, report, llm)
        with stage(args, "continuous against static batching"):
            result = compare_batching(
                llm,
                num_requests=args.num_requests or 320,
                slots=args.slots,
                low=10,
                high=1000,
                seed=llm.resolved.seed,
            )
    report.add("batching", result)


# ---------------------------------------------------------------------- a running server


def _measure_server(args: argparse.Namespace, report: Report) -> None:
    import torch

    from ridgeline.benchmark.environment import environment
    from ridgeline.benchmark.http_client import endpoint, served_models

    server = endpoint(args.url, args.served_model_name or "", first_key(args.api_key_file))
    try:
        name = args.served_model_name or served_models(server)[0]
    except OSError as error:
        raise ConfigError(f"--url {args.url}: {error}") from None
    report.about = {
        "environment": asdict(environment(torch.device("cpu"))),
        "model": {"served_model_name": name, "url": args.url},
    }
    report.add("serving", _serve_load(args, endpoint(args.url, name, server.api_key)))


def _serve_load(args: argparse.Namespace, server: Any) -> LoadResult:
    from random import Random

    from ridgeline.benchmark.http_client import run_http
    from ridgeline.benchmark.jobs import fit, poisson, uniform
    from ridgeline.benchmark.speed import load_result
    from ridgeline.cli.machine import describe

    spec = describe(args.model).spec
    context = getattr(args, "engine_max_model_len", None) or spec.max_position_embeddings
    lengths = fit(args.prompt_len or 512, args.output_len or 128, context)
    rng = Random(0)
    jobs = poisson(rng, uniform(rng, args.num_requests or 64, lengths, spec.vocab_size), args.rate)
    with stage(args, f"serving {args.rate:g} requests a second"):
        run, errors = run_http(server, jobs)
    for error in sorted(set(errors))[:3]:
        note(args, f"failed: {error}")
    return load_result(run, jobs, args.rate, lengths.note)


def first_key(name: str | None) -> str | None:
    """The first key that stands in plain in a file of `ridgeline serve --api-key-file`."""
    from ridgeline.server.auth import DIGEST, key_lines

    if name is None:
        return None
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--api-key-file {name}: {error.strerror}") from None
    keys = [words[0] for _, words in key_lines(text) if not words[0].startswith(DIGEST)]
    if not keys:
        raise ConfigError(f"--api-key-file {name} holds no key")
    return keys[0]


# ---------------------------------------------------------------------- tables

MEMORY_RATE = (
    Column("achieved", "achieved_bytes_per_s", amount("B/s")),
    Column("of read bandwidth", "share_of_bandwidth", percent),
)
LENGTHS = Column("prompt + answer", lambda r: f"{r.prompt_len} + {r.output_len}")
DECODE = (
    Column("batch", "batch"),
    LENGTHS,
    Column("step ms p50", "step_ms.p50", places(3)),
    Column("p99", "step_ms.p99", places(3)),
    Column("tokens a step", "tokens_per_step", ".2f"),
    Column("tok/s", "tokens_per_s", ".1f"),
    Column("bytes a step", "bytes_per_step", amount("B")),
    *MEMORY_RATE,
)
PREFILL = (
    Column("prompt tokens", "prompt_len"),
    Column("TTFT ms", "ttft_ms", places(2)),
    Column("tok/s", "tokens_per_s", ".0f"),
)
SPLIT = ("part", "tokens", "seconds", "share", "tok/s", *(c.heading for c in MEMORY_RATE))
LATENCIES = (("TTFT ms", "ttft_ms"), ("ITL ms", "itl_ms"), ("TPOT ms", "tpot_ms"))
LOAD = (
    Column("what", "what"),
    *(Column(name, f"spread.{name}", places(2)) for name in ("p50", "p90", "p99")),
)


def shown(report: Report) -> Iterator[Table | str]:
    """One table a section, figures with their units."""
    yield from _about_lines(report.about)
    for name, results in report.sections.items():
        yield _TABLES[name](results)
        for text in dict.fromkeys(result.note for result in results if result.note):
            yield f"  note: {text}"
    for result in report.sections.get("cost", ()):
        if result.drafts is not None:
            words = result.drafts.lines(is_calibrated=result.is_calibrated)
            yield f"{result.what}, drafts: {'; '.join(words)}"


def _about_lines(about: dict[str, Any]) -> Iterator[str]:
    place, model = about["environment"], about["model"]
    yield (
        f"{place['date']}  ridgeline {place['ridgeline']} ({place['commit'] or 'no commit'})  "
        f"torch {place['packages'].get('torch', '?')}  {place['device_name']}, "
        f"{place['threads']} threads"
    )
    if "bandwidth" in about:
        read, copy = (
            scaled(about["bandwidth"][f"{what}_bytes_per_s"], "B/s") for what in ("read", "copy")
        )
        yield (
            f"{model['model_name']}: {model['family']}, {model['parameters']:,} parameters, "
            f"{model['dtype']} on {model['device']}; memory read {read}, copy {copy}"
        )


def _split_table(results: Sequence[SplitResult]) -> Table:
    rows: list[Sequence[str]] = []
    for r in results:
        prefill, decode = f"{r.prefill_tokens_per_s:.0f}", f"{r.decode_tokens_per_s:.1f}"
        for name, tokens, took, share, rate in (
            ("prefill", r.prompt_len, r.prefill_s, 1 - r.decode_share, prefill),
            ("decode", r.output_len, r.decode_s, r.decode_share, decode),
        ):
            moved = [c.cell(r) for c in MEMORY_RATE] if name == "decode" else []
            rows.append([name, str(tokens), fixed(took, 3), percent(share), rate, *moved])
    return grid(SPLIT, rows, "where the time of one request goes")


def _load_table(results: Sequence[LoadResult]) -> Table:
    last = results[-1]
    rate = "all at once" if last.rate is None else f"{last.rate:g} a second"
    title = (
        f"{rate}: {last.num_requests - last.failed} of {last.num_requests} answered, "
        f"{last.output_tokens} tokens in {last.wall_s:.2f} s, {last.tokens_per_s:.1f} tok/s"
    )
    latencies = (*LATENCIES, ("E2E ms", "e2e_ms"))
    rows = [{"what": name, "spread": getattr(r, key)} for r in results for name, key in latencies]
    return table(rows, LOAD, title)


def _caching_table(results: Sequence[CachingResult]) -> Table:
    first = results[0]
    columns = (
        Column("mode", "mode"),
        LENGTHS,
        Column("seconds", "seconds", places(3)),
        Column("tok/s", "tokens_per_s", ".1f"),
        Column("speed-up", lambda r: f"{first.seconds / r.seconds:.2f}x"),
        Column("same tokens", lambda r: "yes" if r.token_ids == first.token_ids else "no"),
        Column("cache tokens", "cache_tokens"),
        Column("ran at once", lambda r: r.crowd and f"{r.most_running} of {r.crowd}"),
        Column("all, tok/s", "crowd_tokens_per_s", ".1f"),
    )
    return table(results, columns, "what the KV cache and its pages buy")


def _batching_table(results: Sequence[BatchingResult]) -> Table:
    r = results[-1]
    title = (
        f"{r.num_requests} requests, {r.slots} places, answers of {r.shortest} .. "
        f"{r.longest} tokens: {r.step_ratio:.2f}x fewer steps, {r.time_ratio:.2f}x faster"
    )
    rows = [
        (
            *(name, str(steps), percent(idle / (steps * r.slots))),
            *(f"{took:.2f}", f"{r.output_tokens / took:.1f}"),
        )
        for name, steps, idle, took in (
            ("static", r.static_steps, r.static_idle_slot_steps, r.static_s),
            ("continuous", r.continuous_steps, r.continuous_idle_slot_steps, r.continuous_s),
        )
    ]
    return grid(("batching", "steps", "idle places", "seconds", "tok/s"), rows, title)


def _known(name: str) -> Callable[[RunSummary], Any]:
    """A share of the device's limits, where they are not assumed."""
    return lambda r: None if r.is_assumed_device else getattr(r, name)


COST = (
    Column("steps of", "what"),
    Column("count", "num_steps"),
    Column("achieved", "bytes_per_s", amount("B/s")),
    Column("of bandwidth", _known("share_of_bandwidth"), percent),
    Column("computed", "flops_per_s", amount("FLOP/s")),
    Column("of peak", _known("share_of_peak"), percent),
    Column("of expected time", lambda r: f"{r.expected_ratio:.2f}x" if r.is_calibrated else None),
    Column("host gaps", "host_share", percent),
)


def _cost_table(results: Sequence[RunSummary]) -> Table:
    """All steps of each workload, warm-up included, against their prices and the limits."""
    from ridgeline.observe.run_summary import NOT_CALIBRATED

    first = results[0]
    prices = f"prices {first.origin}" if first.is_calibrated else NOT_CALIBRATED
    return table(results, COST, f"achieved against the limit of {first.device}; {prices}")


_TABLES: dict[str, Callable[[Sequence[Any]], Table]] = {
    "decode": lambda results: table(results, DECODE, "decode"),
    "prefill": lambda results: table(results, PREFILL, "prefill, one prompt alone"),
    "split": _split_table,
    "mixed": _load_table,
    "serving": _load_table,
    "caching": _caching_table,
    "batching": _batching_table,
    "cost": _cost_table,
}
