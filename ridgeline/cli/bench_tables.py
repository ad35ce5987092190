"""How does a person read the results? One table per section, figures with their units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.benchmark.batching import BatchingResult
from ridgeline.benchmark.caching import CachingResult
from ridgeline.benchmark.record import Spread
from ridgeline.benchmark.speed import DecodeSpeed, LoadResult, PrefillSpeed, SplitResult
from ridgeline.cli.session import paper
from ridgeline.figures import fixed, percent, scaled
from ridgeline.observe.readout import NOT_CALIBRATED, ReadOut


def show(about: Mapping[str, Any], sections: Mapping[str, Sequence[Any]]) -> None:
    """Print everything to standard output."""
    out = paper()
    _show_about(out, about)
    for name, results in sections.items():
        out.print(_TABLES[name](results))
        for text in dict.fromkeys(result.note for result in results if result.note):
            out.print(f"  note: {text}")
    for result in sections.get("cost", ()):
        if result.guesses is not None:
            words = result.guesses.words(is_calibrated=result.is_calibrated)
            out.print(f"{result.what}, drafts: {'; '.join(words)}")


def _show_about(out: Console, about: Mapping[str, Any]) -> None:
    place, model = about["environment"], about["model"]
    out.print(
        f"{place['date']}  ridgeline {place['ridgeline']} ({place['commit'] or 'no commit'})  "
        f"torch {place['packages'].get('torch', '?')}  {place['device_name']}, "
        f"{place['threads']} threads"
    )
    if "bandwidth" in about:
        read, copy = (about["bandwidth"][f"{what}_bytes_per_s"] for what in ("read", "copy"))
        out.print(
            f"{model['model_name']}: {model['family']}, {model['parameters']:,} parameters, "
            f"{model['dtype']} on {model['device']}; memory read {giga(read)}, copy {giga(copy)}"
        )


def giga(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else scaled(bytes_per_s, "B/s")


def share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def three(spread: Spread) -> tuple[str, str, str]:
    return fixed(spread.p50, 2), fixed(spread.p90, 2), fixed(spread.p99, 2)


def _decode(results: Sequence[DecodeSpeed]) -> Table:
    table = Table(
        *("batch", "prompt + answer", "step ms p50", "p99", "tokens a step", "tok/s"),
        *("bytes a step", "achieved", "of read bandwidth"),
        title="decode",
    )
    for r in results:
        table.add_row(
            str(r.batch),
            f"{r.prompt_len} + {r.output_len}",
            fixed(r.step_ms.p50, 3),
            fixed(r.step_ms.p99, 3),
            f"{r.tokens_per_step:.2f}",
            f"{r.tokens_per_s:.1f}",
            "-" if r.bytes_per_step is None else scaled(r.bytes_per_step, "B"),
            giga(r.achieved_bytes_per_s),
            share(r.share_of_bandwidth),
        )
    return table


def _prefill(results: Sequence[PrefillSpeed]) -> Table:
    table = Table("prompt tokens", "TTFT ms", "tok/s", title="prefill, one prompt alone")
    for r in results:
        table.add_row(str(r.prompt_len), fixed(r.ttft_ms, 2), f"{r.tokens_per_s:.0f}")
    return table


def _split(results: Sequence[SplitResult]) -> Table:
    table = Table(
        *("part", "tokens", "seconds", "share", "tok/s", "achieved", "of read bandwidth"),
        title="where the time of one request goes",
    )
    for r in results:
        table.add_row(
            "prefill",
            str(r.prompt_len),
            fixed(r.prefill_s, 3),
            share(1 - r.decode_share),
            f"{r.prefill_tokens_per_s:.0f}",
            "",
            "",
        )
        table.add_row(
            "decode",
            str(r.output_len),
            fixed(r.decode_s, 3),
            share(r.decode_share),
            f"{r.decode_tokens_per_s:.1f}",
            giga(r.achieved_bytes_per_s),
            share(r.share_of_bandwidth),
        )
    return table


def _load(results: Sequence[LoadResult]) -> Table:
    table = Table("what", "p50", "p90", "p99", title="many requests")
    for r in results:
        rate = "all at once" if r.rate is None else f"{r.rate:g} a second"
        done = f"{r.num_requests - r.failed} of {r.num_requests} answered"
        table.title = (
            f"{rate}: {done}, {r.output_tokens} tokens in {r.wall_s:.2f} s, "
            f"{r.tokens_per_s:.1f} tok/s"
        )
        for name, spread in (
            ("TTFT ms", r.ttft_ms),
            ("ITL ms", r.itl_ms),
            ("TPOT ms", r.tpot_ms),
            ("E2E ms", r.e2e_ms),
        ):
            table.add_row(name, *three(spread))
    return table


def _caching(results: Sequence[CachingResult]) -> Table:
    table = Table(
        *("mode", "prompt + answer", "seconds", "tok/s", "speed-up", "same tokens"),
        *("cache tokens", "ran at once", "all, tok/s"),
        title="what the KV cache and its pages buy",
    )
    first = results[0]
    for r in results:
        table.add_row(
            r.mode,
            f"{r.prompt_len} + {r.output_len}",
            fixed(r.seconds, 3),
            f"{r.tokens_per_s:.1f}",
            f"{first.seconds / r.seconds:.2f}x",
            "yes" if r.token_ids == first.token_ids else "no",
            _or_dash(r.cache_tokens),
            "-" if r.crowd is None else f"{r.most_running} of {r.crowd}",
            "-" if r.crowd_tokens_per_s is None else f"{r.crowd_tokens_per_s:.1f}",
        )
    return table


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _batching(results: Sequence[BatchingResult]) -> Table:
    table = Table("batching", "steps", "idle places", "seconds", "tok/s")
    for r in results:
        table.title = (
            f"{r.num_requests} requests, {r.slots} places, answers of {r.shortest} .. "
            f"{r.longest} tokens: {r.step_ratio:.2f}x fewer steps, {r.time_ratio:.2f}x faster"
        )
        for name, steps, idle, seconds in (
            ("static", r.static_steps, r.static_idle_slot_steps, r.static_s),
            ("continuous", r.continuous_steps, r.continuous_idle_slot_steps, r.continuous_s),
        ):
            table.add_row(
                name,
                str(steps),
                share(idle / (steps * r.slots)),
                f"{seconds:.2f}",
                f"{r.output_tokens / seconds:.1f}",
            )
    return table


def _cost(results: Sequence[ReadOut]) -> Table:
    """All steps of each workload, warm-up included, against their prices and the limits."""
    table = Table(
        *("steps of", "count", "achieved", "of bandwidth", "computed", "of peak"),
        *("of expected time", "host gaps", "graph padding"),
        title=f"achieved against the limit of {results[0].device}; "
        + (f"prices {results[0].origin}" if results[0].is_calibrated else NOT_CALIBRATED),
    )
    for r in results:
        table.add_row(
            r.what,
            str(r.num_steps),
            giga(r.bytes_per_s),
            share(None if r.is_assumed_device else r.share_of_bandwidth),
            scaled(r.flops_per_s, "FLOP/s"),
            share(None if r.is_assumed_device else r.share_of_peak),
            f"{r.expected_ratio:.2f}x" if r.is_calibrated else "-",
            share(r.host_share),
            share(r.padded_share),
        )
    return table


_TABLES: dict[str, Callable[[Sequence[Any]], Table]] = {
    "decode": _decode,
    "prefill": _prefill,
    "split": _split,
    "mixed": _load,
    "serving": _load,
    "caching": _caching,
    "batching": _batching,
    "cost": _cost,
}
