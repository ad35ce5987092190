"""`ridgeline inspect`: what is this model made of, and what memory would it need?"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.architectures import read_spec
from ridgeline.architectures.catalogue import Entry, catalogue
from ridgeline.architectures.counts import (
    kv_bytes,
    kv_bytes_per_token,
    linear_weights,
    num_active_parameters,
    num_parameters,
    weight_bytes,
)
from ridgeline.architectures.parts import branches
from ridgeline.architectures.scheme_config import is_quantized, scheme_text
from ridgeline.architectures.shapes import SHAPES
from ridgeline.architectures.shares import Shard
from ridgeline.architectures.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    missing,
)
from ridgeline.cli.flags import add_model
from ridgeline.cli.machine import add_layout_flags, describe
from ridgeline.cli.parser import Parser, add_json_flag
from ridgeline.cli.tables import Column, answer, grid, places, plain, table
from ridgeline.cli.values import positive
from ridgeline.cost.fit_suggestions import Limits
from ridgeline.cost.memory import blocks_per_sequence, working_items
from ridgeline.cost.memory_items import RankShare, rank_share
from ridgeline.cost.pipeline import with_cuts
from ridgeline.cost.setup import DTYPE_BYTES, ONE_DEVICE, Layout, Precision, Setup
from ridgeline.cost.steady_state import DEFAULT_TOKEN_BUDGET
from ridgeline.figures import percent
from ridgeline.formats import CHECKPOINT

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """A folder with config.json is enough, or a GGUF file, or the name of a public model
(--list shows them). Where weights are there, the name and shape of each tensor is checked against
the architecture, without reading the weights.

examples:
  ridgeline inspect                                        the bundled model
  ridgeline inspect path/to/model
  ridgeline inspect deepseek-v3                            a public model, without a download
  ridgeline inspect --list
  ridgeline inspect path/to/model.gguf
  ridgeline inspect path/to/model --context 8192 --batch 16
  ridgeline inspect path/to/model --dtype bfloat16 --json
  ridgeline inspect deepseek-v3 --dp 8 --ep 8 --batch 64 --context 8192    each device's share
"""
SHEET = "model source num_layers=spec.num_layers parameters=parts context batch checkpoint=weights"
LISTED = """
name=entry.name family=spec.family hub_id=entry.hub_id source=entry.source
num_layers=spec.num_layers context=spec.max_position_embeddings
"""
RANK = """
rank=share.rank stage=share.stage group=share.group weights=share.weights num_blocks kv_cache
working_space total block_bytes=share.block_bytes expert_ranks=share.expert_ranks
"""
BLOCK_SIZE = 16  # tokens
HALF = 2  # bytes of a number in 16 bits
LEAST_MEMORY = "weights and KV cache only; a running engine also needs some working space"


@dataclass(frozen=True, slots=True)
class Parts:
    """Parameters by what they are for; `active` are those that one token is multiplied by."""

    embedding: int
    layer_matrices: int  # attention and feed-forward
    output_matrix: int  # 0 when it is the embedding
    other: int  # norms, biases, routers
    total: int
    active: int


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes for `batch` requests of `context` tokens in one number format."""

    dtype: str
    weights: int
    kv_per_token: int
    kv_cache: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache


@dataclass(frozen=True, slots=True)
class RankNeed:
    """Bytes of one device of several, for its part of the requests; `working_space` of a step of
    DEFAULT_TOKEN_BUDGET tokens on a GPU."""

    share: RankShare
    num_blocks: int
    working_space: int

    @property
    def kv_cache(self) -> int:
        """With the null block."""
        return (self.num_blocks + 1) * self.share.block_bytes

    @property
    def total(self) -> int:
        return self.share.weights + self.kv_cache + self.working_space

    @property
    def spans(self) -> dict[str, tuple[int, int] | None]:
        """First of each kind that it has, and first that it has no more."""
        share = self.share
        found: dict[str, tuple[int, int] | None] = {
            "layers": (share.layers.start, share.layers.stop)
        }
        for name in ("query_heads", "kv_heads", "experts"):
            held: Shard | None = getattr(share, name)
            found[name] = None if held is None else (held.start, held.start + held.length)
        return found


@dataclass(frozen=True, slots=True)
class Weights:
    """What the checkpoint holds; `dtypes` in the words of its format."""

    tensors: int
    bytes: int
    dtypes: tuple[str, ...]

    @property
    def is_packed(self) -> bool:
        """Some have several numbers in a block, as only GGUF files do."""
        return any(dtype.startswith("Q") for dtype in self.dtypes)


@dataclass(frozen=True, slots=True)
class Sheet:
    """All that is shown. `weights` None: there are none, or this version cannot read them. `source`
    says where the description is from."""

    model: str
    spec: ModelSpec
    context: int
    batch: int
    parts: Parts
    needs: tuple[Need, ...]
    weights: Weights | None
    source: str
    ranks: tuple[RankNeed, ...] = ()
    layout: Layout = ONE_DEVICE


def add_arguments(parser: Parser) -> None:
    add_model(parser, takes_names=True)
    parser.flag("--context N", "tokens of each request", positive)
    parser.flag("--batch B", "requests at once", positive, default=1)
    parser.flag("--dtype", "show this number format only", choices=tuple(DTYPE_BYTES))
    add_layout_flags(parser, parser.flag)
    parser.flag("--list", "list the names of public models that are known")
    add_json_flag(parser.flag)


def run(args: argparse.Namespace) -> int:
    if args.list:
        lines = [Line(entry, read_spec(entry.config)) for entry in catalogue().values()]
        answer(args, lambda: [line.as_json for line in lines], lambda: [_catalogue_table(lines)])
        return 0
    found = describe(args.model)
    spec = found.spec
    context = args.context or spec.max_position_embeddings
    dtypes = [args.dtype] if args.dtype else tuple(DTYPE_BYTES)
    sheet = Sheet(
        args.model,
        spec,
        context,
        args.batch,
        count_parts(spec),
        tuple(need(spec, dtype, context, args.batch) for dtype in dtypes),
        None if found.folder is None else check_weights(found.folder, spec),
        found.source,
        *_rank_needs(args, spec, context),
    )
    answer(args, lambda: as_json(sheet), lambda: _shown(sheet))
    return 0


def count_parts(spec: ModelSpec) -> Parts:
    embedding, layers = spec.vocab_size * spec.hidden_size, linear_weights(spec)
    output = 0 if spec.tie_embeddings else embedding
    total = num_parameters(spec)
    other = total - embedding - layers - output
    return Parts(embedding, layers, output, other, total, num_active_parameters(spec))


def need(spec: ModelSpec, dtype: str, context: int, batch: int) -> Need:
    """What `batch` requests of `context` tokens take; layers with a window keep no more than it.
    Quantized matrices are kept as they are stored."""
    size = DTYPE_BYTES[dtype]
    cache = batch * kv_bytes(spec, context, size)
    weights = weight_bytes(spec, size, CHECKPOINT if is_quantized(spec) else "plain")
    return Need(dtype, weights, kv_bytes_per_token(spec, size), cache)


def _rank_needs(
    args: argparse.Namespace, spec: ModelSpec, context: int
) -> tuple[tuple[RankNeed, ...], Layout]:
    """Of each device, where there are several; stages are cut as they are where they are served."""
    layout = Layout(args.tp, args.pp, args.ep, dp=args.dp)
    if layout.devices == 1:
        return (), layout
    weights = CHECKPOINT if is_quantized(spec) else "plain"
    precision = Precision(args.dtype or spec.dtype, weights)
    from ridgeline.costing import unknown_device  # loads torch

    device = unknown_device("", is_cpu=True, threads=1, memory_bytes=1 << 60)
    layout = with_cuts(Setup(spec, device, layout, precision)).layout
    own_batch = -(-args.batch // layout.dp)
    limits = Limits(context, own_batch, max(DEFAULT_TOKEN_BUDGET, own_batch))
    working = working_items(
        spec,
        num_tokens=limits.max_num_batched_tokens,
        num_rows=own_batch,
        context=context,
        dtype_bytes=precision.dtype_bytes,
        ranks=layout.tp,
        expert_ranks=layout.expert_devices // layout.ep,
    )
    num_blocks = own_batch * blocks_per_sequence(spec, limits)
    space = sum(item.bytes for item in working)
    shares = (
        rank_share(spec, layout, precision, rank, BLOCK_SIZE) for rank in range(layout.devices)
    )
    return tuple(RankNeed(share, num_blocks, space) for share in shares), layout


def check_weights(folder: Path, spec: ModelSpec) -> Weights | None:
    """The weights after their check; None when the folder has none, or no reader knows them.

    ConfigError names the tensor that is missing or has the wrong shape.
    """
    from ridgeline.loader import is_gguf, open_checkpoint
    from ridgeline.loader.quantized_checkpoint import check_model

    if spec.family in SHAPES:
        return None  # no reader of this family names its tensors
    if not is_gguf(folder) and not any(folder.glob("*.safetensors*")):
        return None

    checkpoint = open_checkpoint(folder)
    try:
        check_model(checkpoint, spec, folder)
        names = checkpoint.names()
        num_bytes = sum(checkpoint.num_bytes(name) for name in names)
        dtypes = sorted({checkpoint.dtype(name) for name in names})
        return Weights(len(names), num_bytes, tuple(dtypes))
    finally:
        checkpoint.close()


def facts(spec: ModelSpec) -> dict[str, str]:
    """The architecture in words, one fact a line."""
    layers = Counter((layer.attention, layer.feed_forward) for layer in spec.layers)
    described = {
        "family": spec.family,
        "layers": f"{spec.num_layers}, hidden size {spec.hidden_size}",
        "vocabulary": f"{spec.vocab_size}, output "
        + ("shares the embedding" if spec.tie_embeddings else "has its own matrix"),
        "context": f"{spec.max_position_embeddings} tokens",
        "checkpoint dtype": spec.dtype,
    }
    if needs := missing(spec):
        described["not served"] = f"for planning alone; it needs {', '.join(needs)}"
    if scheme := scheme_text(spec):
        described["quantized matrices"] = scheme
    described["order of a layer"] = "; ".join(dict.fromkeys(map(_order_text, spec.layers)))
    for index, ((attention, feed_forward), count) in enumerate(layers.items()):
        suffix = f" ({count} layers)" if len(layers) > 1 else ""
        number = f" {index + 1}" if len(layers) > 1 else ""
        described[f"attention{number}"] = _attention_text(attention) + suffix
        described[f"feed-forward{number}"] = _feed_forward_text(feed_forward) + suffix
    return described


def _order_text(layer: LayerSpec) -> str:
    """What the layer does, one after the other."""
    words: list[str] = []
    if layer.parallel_norms:
        norm = "one norm" if layer.parallel_norms == 1 else "a norm each"
        return f"{norm}, attention and feed-forward side by side, add"
    for one in branches(layer):
        steps = (one.norm_in and "norm", one.does.replace("_", "-"), one.norm_out and "norm", "add")
        words += [step for step in steps if step]
    return ", ".join(words)


def _attention_text(a: AttentionSpec) -> str:
    extras = [
        "no rotation" if a.rope.kind == "none" else f"rotary {a.rope.kind}, theta {a.rope.theta:g}",
        f"window of {a.window} tokens" if a.window else "all of the past",
        *(["bias on q, k, v"] if a.qkv_bias else []),
        *(["sinks"] if a.sinks else []),
        *([f"norm {'over all heads of' if a.norms_all_heads else 'on'} q and k"] * a.qk_norm),
        *([f"scores capped at {a.scores_cap:g}"] if a.scores_cap else []),
    ]
    heads = f"{a.num_heads} heads of {a.head_dim}, {a.num_kv_heads} KV heads"
    if a.cache_layer is not None:
        heads = f"{a.num_heads} heads of {a.head_dim}, keys and values of layer {a.cache_layer}"
    if a.latent is not None:
        heads = f"{a.num_heads} heads of {a.head_dim}, cached as {a.latent.cached_width} numbers"
    return f"{heads}; {', '.join(extras)}"


def _feed_forward_text(ffn: DenseSpec | ExpertsSpec) -> str:
    if isinstance(ffn, ExpertsSpec):
        groups = f"of the best {ffn.num_active_groups} of {ffn.num_groups} groups, "
        return (
            f"{ffn.num_experts} experts of {ffn.intermediate_size}, {ffn.num_active} per token, "
            + (groups if ffn.num_groups > 1 else "")
            + f"by {ffn.scoring}{' and a bias' * ffn.score_bias}, "
            + (f"and {ffn.shared_size} wide for every token, " if ffn.shared_size else "")
            + ffn.activation
        )
    return f"{ffn.intermediate_size}, {ffn.activation}" + (", gated" if ffn.gated else "")


def as_json(sheet: Sheet) -> dict[str, Any]:
    """Sizes in bytes, counts as numbers."""
    return {
        **plain(sheet, SHEET),
        "architecture": facts(sheet.spec),
        "memory_bytes": {
            row.dtype: plain(row, "weights kv_per_token kv_cache total") for row in sheet.needs
        },
        "ranks": [plain(row, RANK) | row.spans for row in sheet.ranks],
    }


def _shown(sheet: Sheet) -> Iterator[Table | str]:
    yield grid(("", ""), facts(sheet.spec).items(), sheet.model, show_header=False)
    yield _parts_table(sheet)
    yield _memory_table(sheet)
    yield f"  {LEAST_MEMORY}"
    if sheet.ranks:
        yield _ranks_table(sheet)
    yield _weights_line(sheet)


def _parts_table(sheet: Sheet) -> Table:
    parts = sheet.parts
    rows = []
    for name in ("embedding", "layer_matrices", "output_matrix", "other"):
        value = getattr(parts, name)
        rows.append((name.replace("_", " "), f"{value:,}", percent(value / parts.total)))
    if any(isinstance(layer.feed_forward, ExpertsSpec) for layer in sheet.spec.layers):
        rows.append(("active per token", f"{parts.active:,}", ""))
    return grid(("parameters", "count", "share"), rows, f"{parts.total:,} parameters")


def _memory_table(sheet: Sheet) -> Table:
    unit, decimal, binary = _unit(max(row.total for row in sheet.needs))

    def both(heading: str, field: str) -> tuple[Column, Column]:
        """In decimal and binary units, which differ by up to 7 %."""
        return (
            Column(f"{heading} {unit}B", lambda row: getattr(row, field) / decimal, places(3)),
            Column(f"{unit}iB", lambda row: getattr(row, field) / binary, places(3)),
        )

    columns = (
        Column("dtype", "dtype"),
        *both("weights", "weights"),
        Column("KV per token", lambda row: f"{row.kv_per_token:,} B"),
        *both("KV cache", "kv_cache"),
        *both("together", "total"),
    )
    return table(sheet.needs, columns, f"memory for {sheet.batch} x {sheet.context} tokens")


def _ranks_table(sheet: Sheet) -> Table:
    unit, decimal, _ = _unit(max(row.total for row in sheet.ranks))

    def span(name: str) -> Column:
        def text(row: RankNeed) -> str:
            found = row.spans[name]
            return "" if found is None else f"{found[0]}-{found[1] - 1}"

        return Column(name.replace("_", " "), text)

    def amount(heading: str, of: str) -> Column:
        return Column(f"{heading} {unit}B", lambda row: plain(row, of)[of] / decimal, places(3))

    def part(row: RankNeed) -> str:
        return f"1/{row.share.expert_ranks}" if row.share.expert_ranks > 1 else "whole"

    def has(name: str) -> bool:
        return any(row.spans[name] is not None for row in sheet.ranks)

    columns = (
        Column("rank", "share.rank"),
        *([Column("stage", "share.stage")] if sheet.layout.pp > 1 else []),
        *([Column("group", "share.group")] if sheet.layout.dp > 1 else []),
        span("layers"),
        span("query_heads"),
        *([span("kv_heads")] if has("kv_heads") else []),
        *([span("experts"), Column("each", part)] if has("experts") else []),
        Column(f"weights {unit}B", lambda row: row.share.weights / decimal, places(3)),
        Column("blocks", "num_blocks"),
        amount("KV cache", "kv_cache"),
        amount("working", "working_space"),
        amount("together", "total"),
    )
    return table(sheet.ranks, columns, f"memory of each device: {sheet.layout.text}")


def _unit(largest: int) -> tuple[str, float, float]:
    """Letter, decimal size and binary size of the unit in which `largest` reads well."""
    return ("G", 1e9, 2.0**30) if largest >= 100_000_000 else ("M", 1e6, 2.0**20)


def size(num_bytes: int) -> str:
    unit, decimal, binary = _unit(num_bytes)
    return f"{num_bytes / decimal:.3f} {unit}B = {num_bytes / binary:.3f} {unit}iB"


def _weights_line(sheet: Sheet) -> str:
    weights = sheet.weights
    if weights is None:
        return f"weights: none were read, only {sheet.source}"
    packed = "; of those that are packed the quantized matrices above are kept so"
    return (
        f"weights: {weights.tensors} tensors, {size(weights.bytes)}, "
        f"stored as {', '.join(weights.dtypes)}; all that the model needs are there"
        f"{packed if weights.is_packed else ''}"
    )


# ---------------------------------------------------------------------- the public models


@dataclass(frozen=True, slots=True)
class Line:
    """One model of the list."""

    entry: Entry
    spec: ModelSpec

    @property
    def as_json(self) -> dict[str, object]:
        needs = missing(self.spec)
        return {
            **plain(self, LISTED),
            "parameters": num_parameters(self.spec),
            "active_parameters": num_active_parameters(self.spec),
            "kv_bytes_per_token": kv_bytes_per_token(self.spec, HALF),
            "served": not needs,
            "needs": list(needs),
        }


LINES = (
    Column("name", "entry.name"),
    Column("parameters", lambda line: f"{num_parameters(line.spec) / 1e9:.4g} B", right=True),
    Column(
        "KV a token",
        lambda line: f"{kv_bytes_per_token(line.spec, HALF) / 1024:.4g} KiB",
        right=True,
    ),
    Column("context", "spec.max_position_embeddings", right=True),
    Column("served", lambda line: "no" if missing(line.spec) else "yes"),
    Column("hub id", "entry.hub_id"),
)


def _catalogue_table(lines: Sequence[Line]) -> Table:
    """The public models that are known by name."""
    made = table(lines, LINES, box=None, padding=(0, 1, 0, 0))
    made.columns[-1].overflow = "fold"
    return made
