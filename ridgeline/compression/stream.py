"""How is a whole model quantized while no more than one of its layers is in memory?

The states of all windows go through the layers, each of which is read, rounded, written and let
go: of the calibration text those of the quantized model, of the held-out text those of both.
Letters: N windows, S tokens of a window, E hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.parts import layer_tensors, optional_tensors, shared_tensors
from ridgeline.architectures.scheme_config import matrix_schemes, scheme_text
from ridgeline.architectures.spec import ModelSpec, check_served
from ridgeline.architectures.tensor_layouts import (
    checkpoint_layer,
    checkpoint_pattern,
    checkpoint_shapes,
    unstacked,
)
from ridgeline.compression.checkpoints import FileTensors, read_layer, written_layer
from ridgeline.compression.layer import Layer, States, embed
from ridgeline.compression.quality import Head, Quality, compare
from ridgeline.compression.rounding import Method, put, round_layer
from ridgeline.errors import ConfigError
from ridgeline.layers.cut_source import of_parameters
from ridgeline.layers.decoder import embedding_scale, last_norm
from ridgeline.layers.piece import fill
from ridgeline.loader.checkpoint import check_tensors, open_checkpoint
from ridgeline.loader.folder import read_config
from ridgeline.quantization.algorithms.grid import Grid
from ridgeline.quantization.compressed_tensors import quantization_config
from ridgeline.quantization.writer import (
    INDEX_FILE,
    read_shard,
    shard_name,
    write_index,
    write_json,
    write_shard,
)

GROUP_SIZES = (128, 64, 32, 16)  # the usual ones, largest first
SETTINGS_FILE = "quantize-settings.json"
REPORT_FILE = "quantize-report.json"
STATES_FOLDER = ".states"
SPILL_BYTES = 2 << 30  # of states in memory; more go to files in the output folder
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")

Progress = Callable[[int, int], None]  # layers done, layers in all


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids [N, S] of both; S is the same in each window of one text. `is_scored_NS`: the
    held-out tokens that the model should foresee, True or False."""

    calibration_NS: torch.Tensor
    held_out_NS: torch.Tensor
    is_scored_NS: torch.Tensor


@dataclass(frozen=True, slots=True)
class Job:
    """`alone`: also measure each layer as if it alone were quantized, at the price of running
    half of the model's layers once for each. `bits` of each layer, None: those of the method."""

    model: Path
    out: Path
    method: Method
    texts: Texts
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    alone: bool = False
    bits: tuple[int, ...] | None = None
    spill_bytes: int = SPILL_BYTES

    def method_of(self, layer: int) -> Method:
        if self.bits is None:
            return self.method
        return replace(self.method, grid=replace(self.method.grid, bits=self.bits[layer]))


@dataclass(frozen=True, slots=True)
class LayerReport:
    """`drift`: squared distance of the held-out states after this layer from the original's, as a
    share of the squared length of those. `few`: see `Rounded`. `alone`: see Job."""

    layer: int
    bits: int
    num_bytes: int
    original_bytes: int
    seconds: float
    resumed: bool
    drift: float
    few: dict[str, int]
    alone: Quality | None


@dataclass(frozen=True, slots=True)
class Report:
    """`num_bytes` of all tensors written, embeddings and all; `seconds` of this run."""

    quality: Quality
    layers: tuple[LayerReport, ...]
    num_bytes: int
    original_bytes: int
    seconds: float


def stored_dtype(model: Path) -> torch.dtype:
    """Of the checkpoint's matrices; scales are stored in it. ConfigError if it is no float."""
    spec = read_spec(read_config(model))
    check_plain(model, spec)
    source = FileTensors(model, spec.written)
    source.check_floats()
    return source.tensor(checkpoint_pattern(spec, "o").format(layer=0)).dtype


def check_plain(model: Path, spec: ModelSpec) -> None:
    """ConfigError for a checkpoint that somebody has quantized already."""
    if matrix_schemes(spec):
        raise ConfigError(
            f"{model}: config.json has a quantization_config ({scheme_text(spec)}); quantize the"
            " checkpoint of 16 or 32 bits that it was made from"
        )


def quantize_model(job: Job, progress: Progress = lambda done, of: None) -> Report:
    """Write the model into `job.out`, which holds nothing or an interrupted run with the same
    settings; then that goes on. ConfigError says what is wrong before anything is computed."""
    config = read_config(job.model)
    spec = read_spec(config)
    check_served(spec)
    check_plain(job.model, spec)
    source, checkpoint = (
        FileTensors(job.model, spec.written),
        open_checkpoint(job.model, written=spec.written),
    )
    expected, optional = checkpoint_shapes(spec), optional_tensors(spec)
    left_out = (name for name in checkpoint.names() if name.startswith(spec.left_out))
    optional |= {name: checkpoint.shape(name) for name in left_out}
    check_tensors(checkpoint, expected, job.model, optional=optional)
    source.check_floats()
    check_groups(spec, job.method.grid.group)
    _prepare(job, config)
    run = _Run(job, spec, source)
    try:
        report = run.all_layers(progress)
    finally:
        shutil.rmtree(job.out / STATES_FOLDER, ignore_errors=True)
    _finish(job, config, run.written, run.shard_of, report)
    return report


def columns(spec: ModelSpec) -> dict[str, int]:
    """Of each matrix that is quantized, by name."""
    every = (item for i in range(spec.num_layers) for item in layer_tensors(spec, i).items())
    return {name: part.shape[1] for name, part in every if part.is_packed}


def fitting_groups(spec: ModelSpec) -> tuple[int, ...]:
    """Of the usual group sizes those that divide the columns of every matrix, the largest first;
    then 0, one scale for a whole row, which always fits."""
    widths = set(columns(spec).values())
    return (*(n for n in GROUP_SIZES if not any(width % n for width in widths)), 0)


def check_groups(spec: ModelSpec, group: int) -> None:
    """ConfigError names the first matrix that groups of this size do not divide."""
    for name, width in columns(spec).items():
        if group and width % group:
            *sizes, _ = fitting_groups(spec)
            fit = "".join(f"{size}, " for size in sizes)
            raise ConfigError(
                f"--group-size {group} does not divide the {width} columns of {name}; what fits "
                f"every matrix: {fit}or 0 for one scale a row"
            )


def _prepare(job: Job, config: Mapping[str, object]) -> None:
    settings = _settings(job, config)
    path = job.out / SETTINGS_FILE
    if job.out.resolve() == job.model.resolve():
        raise ConfigError(f"{job.out}: is the model itself; choose another folder with -o")
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != settings:
            raise ConfigError(
                f"{job.out}: holds an interrupted run with other settings (see {SETTINGS_FILE});"
                " give the same ones to go on, or remove the folder"
            )
    elif job.out.exists() and (not job.out.is_dir() or any(job.out.iterdir())):
        raise ConfigError(f"{job.out}: is not empty; choose a new folder with -o")
    try:
        (job.out / STATES_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{job.out}: cannot be made ({error.strerror})") from None
    for left in (job.out / STATES_FOLDER).iterdir():
        left.unlink()
    write_json(path, settings)


def _settings(job: Job, config: Mapping[str, object]) -> dict[str, Any]:
    """All that decides what is written."""
    grid, tuned = job.method.grid, job.method.gptq

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    texts = (job.texts.calibration_NS, job.texts.held_out_NS)
    return {
        "method": job.method.name,
        "bits": grid.bits if job.bits is None else list(job.bits),
        "group_size": grid.group,
        "symmetric": grid.symmetric,
        "scales": str(grid.scale_dtype).removeprefix("torch."),
        "damping": tuned.damping,
        "act_order": tuned.act_order,
        "search": tuned.search,
        "config": digest(json.dumps(config, sort_keys=True).encode()),
        "weights": digest(_marks(job.model).encode()),
        "texts": [[*t.shape, digest(t.contiguous().numpy().tobytes())] for t in texts],
    }


def _marks(model: Path) -> str:
    """Names, sizes and times of the weights' files."""
    files = sorted(model.glob("*.safetensors"))
    return ";".join(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)


class _Run:
    def __init__(self, job: Job, spec: ModelSpec, source: FileTensors) -> None:
        self.job, self.spec, self.files = job, spec, source
        self.source = of_parameters(source, spec)
        self.written = unstacked(spec)
        self.count = spec.num_layers + 1
        self.shard_of: dict[str, str] = {}
        texts, width = job.texts, spec.hidden_size
        counted = [texts.held_out_NS.numel() * (2 + job.alone * spec.num_layers)]
        if job.method.needs_text:
            counted.append(texts.calibration_NS.numel())
        self.spills = sum(counted) * width * 4 > job.spill_bytes
        self.num_states = 0
        embedding_VE = source.tensor(spec.tensor_names["embedding"])
        none_NS = texts.calibration_NS[:0]
        used_NS = texts.calibration_NS if job.method.needs_text else none_NS
        self.calibration = self._states(used_NS, embedding_VE)
        self.original = self._states(texts.held_out_NS, embedding_VE)
        self.quantized = self._states(texts.held_out_NS, embedding_VE)
        self.alone: list[States] = []
        self.max_tokens = max(texts.calibration_NS.shape[1], texts.held_out_NS.shape[1])

    def _states(self, windows_NS: torch.Tensor, embedding_VE: torch.Tensor) -> States:
        states = self._empty(windows_NS)
        embed(states, windows_NS, embedding_VE, embedding_scale(self.spec, torch.float32))
        if self.spec.learned_positions:
            table_PE = self.source.tensor(self.spec.tensor_names["positions"]).float()
            for part_BSE in states.parts():
                part_BSE.add_(table_PE[: part_BSE.shape[1]])
        return states

    def _empty(self, windows_NS: torch.Tensor) -> States:
        self.num_states += 1
        file = self.job.out / STATES_FOLDER / str(self.num_states) if self.spills else None
        if not windows_NS.numel():
            file = None
        windows, tokens = windows_NS.shape
        return States(windows, tokens, self.spec.hidden_size, file)

    @torch.inference_mode()
    def all_layers(self, progress: Progress) -> Report:
        started, rows = time.perf_counter(), []
        for index in range(self.spec.num_layers):
            progress(index, self.spec.num_layers)
            rows.append(self._layer(index))
        progress(self.spec.num_layers, self.spec.num_layers)
        head = self._head()
        quality = self._compare(head, self.quantized)
        alone = [self._compare(head, one) for one in self.alone]
        layers = [
            LayerReport(*row, alone=alone[index] if alone else None)
            for index, row in enumerate(rows)
        ]
        names = list(shared_tensors(self.spec))
        rest = write_shard(
            self.job.out / shard_name(self.count - 1, self.count),
            {name: self.source.tensor(name) for name in names},
            {},
        )
        self.shard_of.update(dict.fromkeys(names, shard_name(self.count - 1, self.count)))
        return Report(
            quality,
            tuple(layers),
            rest + sum(one.num_bytes for one in layers),
            rest + sum(one.original_bytes for one in layers),
            time.perf_counter() - started,
        )

    def _compare(self, head: Head, states: States) -> Quality:
        texts, device = self.job.texts, self.job.device
        scored_NS = texts.is_scored_NS
        return compare(head, self.original, states, texts.held_out_NS, scored_NS, device)

    def _layer(self, index: int) -> tuple[int, int, int, int, float, bool, float, dict[str, int]]:
        started = time.perf_counter()
        job, device = self.job, self.job.device
        path = job.out / shard_name(index, self.count)
        names = list(checkpoint_layer(self.spec, index))
        layer = Layer(self.source, self.spec, index, max_tokens=self.max_tokens, device=device)
        if job.alone:
            self.alone.append(self._branch())
        self.original.advance(layer, device)
        for one in self.alone[:-1]:
            one.advance(layer, device)
        resumed = path.exists()
        if resumed:
            tensors, few = self._resume(layer, path, job.method_of(index))
        else:
            rounded = round_layer(layer, self.calibration, job.method_of(index))
            tensors, few = written_layer(rounded, self.source, self.written, index), rounded.few
            write_shard(path, tensors, {"layer": index, "few": few})
        self.shard_of.update(dict.fromkeys(tensors, path.name))
        self.quantized.advance(layer, device)
        if self.alone:
            self.alone[-1].advance(layer, device)
        num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        was = sum(self.files.num_bytes(name) for name in names)
        seconds = time.perf_counter() - started
        bits, moved = job.method_of(index).grid.bits, drift(self.original, self.quantized)
        return index, bits, num_bytes, was, seconds, resumed, moved, few

    def _branch(self) -> States:
        """A copy of the original states as they are now."""
        states = self._empty(self.job.texts.held_out_NS)
        states.all_NSE.copy_(self.original.all_NSE)
        return states

    def _resume(
        self, layer: Layer, path: Path, method: Method
    ) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """What an earlier run made of this layer, and what few tokens came to; the layer and the
        states are as they were."""
        tensors, note = read_shard(path)
        device = self.job.device
        moved = {name: tensor.to(device) for name, tensor in tensors.items()}
        grids = dict.fromkeys(layer.matrices, method.grid)
        put(layer, read_layer(moved, self.written, layer.index, grids))
        self.calibration.advance(layer, device)
        return tensors, note.get("few", {})

    def _head(self) -> Head:
        spec, names = self.spec, self.spec.tensor_names
        norm = last_norm(spec, torch.float32, self.job.device)
        for piece in norm.pieces():
            fill(piece, self.source)
        norm.finish()
        matrix = names["embedding" if spec.tie_embeddings else "lm_head"]
        return Head(norm, self.source.tensor(matrix), spec.logits_cap)


def drift(original: States, quantized: States) -> float:
    """See LayerReport."""
    apart = length = 0.0
    for one_BSE, other_BSE in zip(original.parts(), quantized.parts(), strict=True):
        apart += float((one_BSE - other_BSE).square().sum())
        length += float(one_BSE.square().sum())
    return apart / length if length else 0.0


def _finish(
    job: Job,
    config: Mapping[str, object],
    spec: ModelSpec,
    shard_of: Mapping[str, str],
    report: Report,
) -> None:
    for pattern in COPIED:
        for path in sorted(job.model.glob(pattern)):
            if path.name not in ("config.json", INDEX_FILE, SETTINGS_FILE, REPORT_FILE):
                shutil.copyfile(path, job.out / path.name)
    ignored = [spec.tensor_names["lm_head"].removesuffix(".weight")]
    for index in range(spec.num_layers):
        named = layer_tensors(spec, index).items()
        ignored += [
            name.removesuffix(".weight")
            for name, part in named
            if part.product and not part.is_packed
        ]
    act_order = job.method.name == "gptq" and job.method.gptq.act_order
    described = quantization_config(_targets(job, spec), ignore=ignored, act_order=act_order)
    write_json(job.out / "config.json", {**config, "quantization_config": described})
    write_index(job.out, shard_of, report.num_bytes)
    (job.out / SETTINGS_FILE).unlink()


def _targets(job: Job, spec: ModelSpec) -> dict[str, Grid]:
    """Which modules have which grid: all linear ones the same, or layers named one by one."""
    if job.bits is None:
        return {"Linear": job.method.grid}
    stem = checkpoint_pattern(spec, "o").partition("{layer}")[0]
    every = range(spec.num_layers)
    tensors = {
        stored: own[0][0] for i in every for stored, own in checkpoint_layer(spec, i).items()
    }
    packed = [stored for stored, first in tensors.items() if first in columns(spec)]
    modules = sorted({n.removesuffix(".weight").rpartition(".")[2] for n in packed})
    ending = f"[.]({'|'.join(modules)})$"  # norms and routers are no targets
    found: dict[str, Grid] = {}
    for bits in sorted(set(job.bits)):
        layers = "|".join(str(index) for index, own in enumerate(job.bits) if own == bits)
        grid = replace(job.method.grid, bits=bits)
        found[f"re:{re.escape(stem)}({layers})[.].*{ending}"] = grid
    return found
