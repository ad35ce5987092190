"""`ridgeline quantize`: make a model smaller, and say what that costs in quality."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline import demo
from ridgeline.architectures import read_spec
from ridgeline.cli.flags import add_model
from ridgeline.cli.machine import THIS
from ridgeline.cli.parser import Parser, add_json_flag
from ridgeline.cli.session import bars, note
from ridgeline.cli.tables import Column, answer, grid, table
from ridgeline.cli.values import number, positive, whole
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from ridgeline.compression.stream import Job, LayerReport, Progress, Report, Texts
    from ridgeline.evaluation.intervals import Row
    from ridgeline.evaluation.texts import Marked
    from ridgeline.text.tokenizer import Tokenizer

METHODS = ("rtn", "gptq", "awq")
BITS = 4
PRICED = {4: "int4", 8: "int8"}  # bits -> the number format that the cost model knows
EXAMPLES = """Weights of attention and feed-forward become integers with a scale for each
group; norms, embeddings, the output matrix and routers of experts stay as they are. One layer is in
memory at a time, and an interrupted run goes on where it was when it is started again with the same
words.

methods:
  rtn    round each weight to nearest: needs no text, is done in a moment, loses most
  gptq   round column by column and let later columns make good for earlier ones, as the inputs
         of a calibration text say
  awq    multiply the inputs that matter and cut spans where that helps, then round; the factors
         go into the norm or matrix before, so the model is as fast as with rtn

Experts that too few tokens of the calibration text came to (gptq: fewer than a matrix has inputs,
awq: than an eighth of them) are rounded to nearest, and the report counts and names them.

DIR gets the compressed-tensors layout (pack-quantized). Transformers reads it with the package
compressed-tensors 0.20 or later; with --asymmetric that package unpacks each matrix, but
Transformers 5.23 expects another shape of the zero points and refuses the folder. vLLM has kernels
for 4 and 8 bits. Ridgeline serves DIR as it is: `ridgeline generate DIR`.

The report is about text that was not used for calibration. KL: how far the next token's
distribution is from the original model's (nats, 0 is equal). Perplexity, of both. Same top: how
often both would say the same. Drift: how far each layer's states have moved. It is also written to
DIR/quantize-report.json.

examples:
  ridgeline quantize -o small --method gptq --bits 4                the bundled model
  ridgeline quantize path/to/model -o small --method awq --bits 4 --group-size 64 --asymmetric
  ridgeline quantize path/to/model -o small --mixed 3.5             more bits where they matter
  ridgeline quantize path/to/model -o small --method rtn --bits 8 --group-size 0
  ridgeline quantize path/to/model -o small --calibration mine.txt --held-out other.txt
  ridgeline quantize -o small --bits 3 --score 50 --per-layer       exact answers, layer by layer
"""


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    parser.flag("-o --output DIR", "a new folder", required=True)
    flag = parser.flags("how")
    flag("--method", "see below (default: %(default)s)", default="gptq", choices=METHODS)
    flag("--bits 2..8", f"(default: {BITS})", int, choices=range(2, 9))
    flag(
        "--mixed MEAN",
        "in place of --bits: each layer gets from 2 to 8 bits, as its measured KL says, and "
        "all together take no more than with MEAN bits each",
        number(2, 8),
    )
    share = "neighbours of a row that share a scale, 0: a whole row (default: the largest of 128, "
    share += "64, 32 and 16 that fits every matrix)"
    flag("--group-size N", share, int)
    flag("--asymmetric", "each group has a zero point as well")
    added = "gptq: of the Hessian's mean, added to its diagonal (default: %(default)s)"
    flag("--damping SHARE", added, float, default=0.01)
    flag("--no-act-order", "gptq: columns in the order of the matrix")
    flag("--device", "computes (default: cpu)", default="cpu", choices=("cpu", "cuda"))
    _add_texts(parser)
    parser.mark_expert(
        *("--damping", "--no-act-order", "--window", "--num-windows", "--num-held-out"),
        *("--predict-on", "--per-layer"),
    )
    add_json_flag(parser.flag)
    parser.flag("-q --quiet", "say nothing but the answer")


def _add_texts(parser: Parser) -> None:
    flag = parser.flags("text and report")
    flag("--calibration FILE", "UTF-8 text, perhaps gzipped (default: bundled)")
    flag("--held-out FILE", "text of the report, another one (default: bundled)")
    flag("--window TOKENS", "(default: %(default)s)", whole(2), default=512)
    flag("--num-windows N", "of calibration (128)", positive, default=128)
    flag("--num-held-out N", "windows of the report (32)", positive, default=32)
    flag(
        "--predict-on DEVICE",
        "speed there by the cost model, for 4 and 8 bits, as `ridgeline predict` has it",
    )
    flag("--per-layer", "also what each layer alone costs; takes longer")
    scored = "exact answers to N problems of each task of `ridgeline eval`, before and after"
    flag("--score N", scored, whole(0), default=0)


def run(args: argparse.Namespace) -> int:
    from ridgeline.compression.adviser import advise
    from ridgeline.compression.stream import REPORT_FILE, quantize_model
    from ridgeline.quantization.writer import write_json

    job = read_job(args)
    if args.group_size is None:
        _say_group(args, job)
    advice = None
    if args.mixed is not None:
        advice = advise(job, args.mixed, lambda bits: note(args, f"measuring {bits} bits"))
        job = replace(job, bits=advice.bits)
    with _bar(args) as progress:
        report = quantize_model(job, progress)
    scores = _scores(args, job) if args.score else {}
    speeds = predicted(args) if args.predict_on else {}
    record = as_json(args, job, report, scores)
    record["advice"] = None if advice is None else asdict(advice)
    record["predicted"] = speeds
    write_json(job.out / REPORT_FILE, record)
    answer(args, lambda: record, lambda: _shown(args, report, scores, speeds))
    note(args, f"[{report.seconds:.1f} s, written to {job.out}]")
    return 0


def read_job(args: argparse.Namespace) -> Job:
    """What the flags ask for. ConfigError for what cannot be."""
    import torch

    from ridgeline.compression.rounding import Method
    from ridgeline.compression.stream import Job, stored_dtype
    from ridgeline.loader import resolve_model
    from ridgeline.quantization.algorithms.gptq import MAX_DAMPING, GptqSettings
    from ridgeline.quantization.algorithms.grid import Grid

    if not 0 < args.damping <= MAX_DAMPING:
        raise ConfigError(f"--damping is {args.damping}; it lies above 0 and at most {MAX_DAMPING}")
    if args.mixed is not None and args.bits is not None:
        raise ConfigError("--mixed is in place of --bits; leave one of the two out")
    if args.predict_on and (_bits(args) not in PRICED or args.mixed is not None):
        raise ConfigError("--predict-on: the cost model knows 4 and 8 bits alone; leave it out")
    if args.predict_on not in (None, THIS):
        _check_catalogue(args.predict_on)
    if args.group_size is not None and args.group_size < 0:
        raise ConfigError(f"--group-size is {args.group_size}; give 0 for one scale a row, or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; leave it out to use the CPU")
    model = resolve_model(demo.located(args.model)).path
    dtype = stored_dtype(model)
    grid = Grid(_bits(args), _group_size(args, model), not args.asymmetric, dtype)
    gptq = GptqSettings(args.damping, not args.no_act_order)
    return Job(
        model,
        Path(args.output).expanduser(),
        Method(args.method, grid, dtype, gptq),
        read_texts(args, model),
        torch.device(args.device),
        args.per_layer,
    )


def _group_size(args: argparse.Namespace, model: Path) -> int:
    """One for all matrices. ConfigError when the one that was asked for does not fit them."""
    from ridgeline.compression.stream import check_groups, fitting_groups
    from ridgeline.loader import read_config

    spec = read_spec(read_config(model))
    if args.group_size is None:
        return fitting_groups(spec)[0]
    check_groups(spec, args.group_size)
    return int(args.group_size)


def _say_group(args: argparse.Namespace, job: Job) -> None:
    """What nobody asked for is said, with its reason."""
    from ridgeline.compression.stream import GROUP_SIZES, columns
    from ridgeline.loader import read_config

    size = job.method.grid.group
    widths = sorted(set(columns(read_spec(read_config(job.model))).values()))
    why = "the largest usual one that divides" if size else f"none of {GROUP_SIZES} divides"
    found = ", ".join(map(str, widths))
    note(args, f"group size {size or 'a whole row'}: {why} the columns of every matrix ({found})")


def _check_catalogue(name: str) -> None:
    """Before hours are spent on what is to be priced for this device."""
    from ridgeline.cli.machine import open_device

    try:
        open_device(name)
    except ConfigError as problem:
        raise ConfigError(f"--predict-on {name}: {str(problem).partition('; ')[2]}") from None


def _bits(args: argparse.Namespace) -> int:
    return BITS if args.bits is None else int(args.bits)


def read_texts(args: argparse.Namespace, model: Path) -> Texts:
    """The windows. ConfigError when a text is shorter than one."""
    import torch

    from ridgeline.compression.layer import cut
    from ridgeline.compression.stream import Texts
    from ridgeline.loader import read_config
    from ridgeline.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ConfigError(f"{model}: has no tokenizer, so no text can be read by the model")
    limit = read_spec(read_config(model)).max_position_embeddings
    if args.window > limit:
        raise ConfigError(f"--window is {args.window}; this model's context is {limit} tokens")

    def windows(file: str | None, split: Any, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        marked = _marked(tokenizer, model, file, split, most * args.window)
        first = None if file is None else tokenizer.bos_token_id
        ids_NS = cut(marked.token_ids, length=args.window, first=first, most=most)
        if not len(ids_NS):
            raise ConfigError(
                f"{file or 'the bundled text'}: has {len(marked.token_ids)} tokens, less than one"
                f" window of {args.window}; give a longer text or a smaller --window"
            )
        scored_NS = cut(marked.is_scored, length=args.window, first=first, most=most)
        return ids_NS, scored_NS.bool()

    calibration_NS, _ = windows(args.calibration, "train", args.num_windows)
    held_out_NS, is_scored_NS = windows(args.held_out, "test", args.num_held_out)
    if not bool(is_scored_NS[:, 1:].any()):
        raise ConfigError(
            f"--num-held-out is {args.num_held_out}; so little text has questions alone and no"
            " answer to be foreseen; give more windows"
        )
    return Texts(calibration_NS, held_out_NS, is_scored_NS)


def _marked(
    tokenizer: Tokenizer, model: Path, file: str | None, split: Any, num_tokens: int
) -> Marked:
    from ridgeline.evaluation.texts import bundled_tokens, read_text, text_tokens
    from ridgeline.text.chat import load_chat_template

    if file is not None:
        return text_tokens(tokenizer, read_text(Path(file).expanduser()))
    return bundled_tokens(tokenizer, load_chat_template(model, tokenizer), split, num_tokens)


def predicted(args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of one request, by the cost model, with the original weights and with the
    format of ours that is nearest: int4 has groups of 128, int8 whole rows."""
    from ridgeline.cli import predict as command
    from ridgeline.cli.parser import Parser
    from ridgeline.cli.predict import predict

    parser = Parser()
    command.add_arguments(parser)

    def rate(*weights: str) -> float:
        words = [args.model, "--device", args.predict_on, *weights]
        return predict(parser.parse_args(words)).found.tokens_per_s

    name = PRICED[_bits(args)]
    return {"original": rate(), name: rate("--weights", name)}


def _scores(args: argparse.Namespace, job: Job) -> dict[str, tuple[Row, ...]]:
    """Rows of `ridgeline eval` for the original and for the dequantized weights."""
    from ridgeline.compression.checkpoints import write_plain

    with tempfile.TemporaryDirectory(prefix="plain-", dir=job.out) as folder:
        plain = Path(folder) / "model"
        write_plain(job.out, plain)
        models = {"original": job.model, "quantized": plain}
        return {what: _evaluated(args, what, model) for what, model in models.items()}


def _evaluated(args: argparse.Namespace, what: str, model: Path) -> tuple[Row, ...]:
    from ridgeline.evaluation.run import Wanted, all_tasks, evaluate
    from ridgeline.llm import LLM

    note(args, f"scores of the {what} model")
    with LLM(str(model), device=args.device, warm_up="off", progress=None) as llm:
        progress = False if args.quiet else None
        return evaluate(llm, Wanted(all_tasks(), args.score), progress=progress).rows


@contextmanager
def _bar(args: argparse.Namespace) -> Iterator[Progress]:
    import sys

    if args.quiet or not sys.stderr.isatty():
        yield lambda done, of: None
        return
    with bars("MofNCompleteColumn", "TimeRemainingColumn") as report:
        yield lambda done, of: report("layers", done, of)


def as_json(
    args: argparse.Namespace, job: Job, report: Report, scores: dict[str, tuple[Row, ...]]
) -> dict[str, Any]:
    """The report as plain JSON values."""
    grid, texts = job.method.grid, job.texts
    return {
        "model": args.model,
        "method": job.method.name,
        "bits": grid.bits if job.bits is None else list(job.bits),
        "group_size": grid.group,
        "symmetric": grid.symmetric,
        "act_order": job.method.name == "gptq" and job.method.gptq.act_order,
        "calibration": {
            "text": args.calibration or "bundled",
            "tokens": texts.calibration_NS.numel() if job.method.needs_text else 0,
        },
        "held_out": {"text": args.held_out or "bundled", "tokens": texts.held_out_NS.numel()},
        **asdict(report),
        "scores": {what: [asdict(row) for row in rows] for what, rows in scores.items()},
    }


def _shown(
    args: argparse.Namespace,
    report: Report,
    scores: dict[str, tuple[Row, ...]],
    speeds: dict[str, float],
) -> Iterator[Table | str]:
    from rich import box

    quality = report.quality
    rows = (
        ("KL, nats a token", "0", f"{quality.kl:.5f}"),
        ("perplexity", f"{quality.original_perplexity:.4f}", f"{quality.perplexity:.4f}"),
        ("same top", "1", f"{quality.same_top:.4f}"),
        ("MB", f"{report.original_bytes / 1e6:.2f}", f"{report.num_bytes / 1e6:.2f}"),
    )
    yield grid(("all layers", "original", "quantized"), rows, box=box.SIMPLE)
    alone = any(one.alone for one in report.layers)
    yield table(report.layers, (*LAYERS, *ALONE) if alone else LAYERS, box=box.SIMPLE)
    yield from (_few(one) for one in report.layers if one.few)
    if scores:
        pairs = zip(scores["original"], scores["quantized"], strict=True)
        yield table(pairs, SCORES, box=box.SIMPLE)
    for what, rate in speeds.items():
        yield f"predicted on {args.predict_on}, {what} weights: {rate:.1f} tokens/s"


def _few(layer: LayerReport) -> str:
    name, least = min(layer.few.items(), key=lambda item: item[1])
    return (
        f"layer {layer.layer}: {len(layer.few)} matrices are rounded to nearest, since too few of "
        f"the calibration's tokens came to them ({least} to {max(layer.few.values())}; fewest to "
        f"{name}); more --num-windows bring more"
    )


LAYERS = (
    Column("layer", "layer", right=True),
    Column("bits", "bits", right=True),
    Column("MB", lambda one: one.num_bytes / 1e6, ".2f", right=True),
    Column("drift", "drift", ".2e", right=True),
    Column("s", lambda one: "done before" if one.resumed else one.seconds, ".1f", right=True),
)
ALONE = (
    Column("KL alone", "alone.kl", ".5f", right=True),
    Column("perplexity alone", "alone.perplexity", ".4f", right=True),
)
SCORES = (
    Column("task", lambda pair: pair[0].task),
    Column("metric", lambda pair: pair[0].metric),
    Column("original", lambda pair: pair[0].value, ".4f", right=True),
    Column("quantized", lambda pair: pair[1].value, ".4f", right=True),
)
