"""What ranks are asked to compute: a model of random numbers, or a folder, by one rank's share."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.spec import ModelSpec
from ridgeline.architectures.stages import stage_groups, stage_spec
from ridgeline.architectures.tensor_layouts import checkpoint_shapes
from ridgeline.distributed.placement import Placement
from ridgeline.kernels.cpu import native
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.layers.piece import TensorSource
from ridgeline.loader import open_checkpoint, read_config
from ridgeline.quantization.plain import PlainWeights
from tests.layers.driving import Driver, TensorDict, build_decoder
from tests.layers.test_stages import single

PROMPTS = {"a": [3, 14, 15, 92, 65, 35, 89, 79, 32], "b": [8, 9, 79], "c": [46]}
NEW_TOKENS = 5
WEIGHT_STD = 0.2

Tokens = list[list[int]]  # of each step, of each prompt
Matrices = dict[str, list[tuple[int, int, torch.Tensor]]]  # by name: row, column, what is there


@dataclass(frozen=True)
class Case:
    """`config` is a config.json, or there is a `folder`; `native`: by the native kernels of CPUs,
    which round inputs."""

    config: Mapping[str, Any]
    weight_format: str = "plain"
    kv_format: str = "auto"
    dtype: str = "float32"
    native: bool = False
    folder: str = ""

    @property
    def spec(self) -> ModelSpec:
        return read_spec(read_config(Path(self.folder)) if self.folder else self.config)

    def source(self) -> TensorSource:
        return open_checkpoint(Path(self.folder)) if self.folder else numbers(self.spec)


@dataclass(frozen=True)
class Answer:
    """`logits` of the prompts' tokens, and of each step behind them; `tokens` are the likeliest."""

    logits: torch.Tensor
    tokens: Tokens


@contextmanager
def kernels(case: Case) -> Iterator[None]:
    off = not case.native and native.library() is not None
    with native.at_level("none") if off else nullcontext():
        yield


def numbers(spec: ModelSpec, seed: int = 0) -> TensorSource:
    """Of each tensor by its name, biases and norms included."""
    found = {}
    for name, shape in checkpoint_shapes(spec).items():
        noise = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
        around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        found[name] = around + WEIGHT_STD * torch.randn(shape, generator=noise)
    return TensorDict(found)


def decoder_of(placement: Placement, case: Case, layers: range | None = None) -> Decoder:
    """`layers`: of a stage that has these."""
    decoder = build_decoder(
        case.spec if layers is None else stage_spec(case.spec, layers),
        max_model_len=64,
        placement=placement,
        dtype=getattr(torch, case.dtype),
        weight_format=case.weight_format,
        kv_format=case.kv_format,
        device="cpu",
    )
    decoder.load(case.source())
    return decoder


def answer_of(decoder: Decoder, case: Case, said: Tokens | None = None) -> Answer:
    """`said`: the tokens behind the prompts, whatever is likeliest."""
    heads = decoder.placement.shard_heads(case.spec.layers[0].attention.num_kv_heads).length
    driver = Driver(decoder, num_kv_heads=heads, kv_format=case.kv_format, num_blocks=64)
    work: dict[str, list[int]] = dict(PROMPTS)
    logits: list[torch.Tensor] = []
    tokens: Tokens = []
    for step in range(NEW_TOKENS):
        found = driver.step(work)
        logits += found.values()
        tokens.append([int(one[-1].argmax()) for one in found.values()])
        following = tokens[-1] if said is None else said[step]
        work = {name: [token] for name, token in zip(PROMPTS, following, strict=True)}
    return Answer(torch.cat(logits), tokens)


def linears(decoder: Decoder) -> Iterator[Linear]:
    for layer in decoder.layers:
        yield from (part for part in layer.parts() if isinstance(part, Linear))


def shares_of(decoder: Decoder) -> Matrices:
    """What this rank multiplies by, as numbers."""
    found: Matrices = {}
    for linear in linears(decoder):
        rows, begin = linear.format.dequantize(linear.parameters).float(), 0
        column = 0 if linear.columns is None else linear.columns.start
        for part in linear.parts:
            own = rows[begin : begin + part.rows.length]
            found.setdefault(part.weight, []).append((part.rows.start, column, own.clone()))
            begin += part.rows.length
    return found


def with_numbers(decoder: Decoder, every: list[Matrices]) -> Decoder | None:
    """The decoder of one rank, which multiplies by what several ranks have; None where two of them
    have other numbers for the same weights: a KV head's, of formats whose scales rows share."""
    for linear in linears(decoder):
        parts = []
        for part in linear.parts:
            whole = torch.full((part.rows.length, linear.inputs), torch.nan)
            for held in every:
                for row, column, own in held.get(part.weight, []):
                    place = whole[row : row + own.shape[0], column : column + own.shape[1]]
                    if not (place.isnan() | (place == own)).all():
                        return None
                    place.copy_(own)
            assert not whole.isnan().any(), f"nobody has all of {part.weight}"
            parts.append(whole)
        linear.format = PlainWeights()
        linear.parameters = {"weight": torch.cat(parts).to(decoder.dtype)}
    return decoder


@dataclass(frozen=True)
class Share:
    """What a rank made of a case: `logits` as bytes, what it multiplied by, the bytes it holds."""

    logits: bytes
    tokens: Tokens
    held: dict[str, list[tuple[int, int, Any]]]
    num_bytes: int


def share_of_work(placement: Placement, case: Case, ep: int, said: Tokens | None) -> Share:
    """A rank's job."""
    placement = Placement(placement.rank, placement.size, placement.collective, ep)
    with kernels(case):
        decoder = decoder_of(placement, case)
        answer = answer_of(decoder, case, said)
        held = {
            name: [(row, column, own.numpy()) for row, column, own in pieces]
            for name, pieces in shares_of(decoder).items()
        }
    return Share(answer.logits.numpy().tobytes(), answer.tokens, held, decoder.num_bytes)


def stages_are_whole(placement: Placement, case: Case, ep: int) -> bool:
    """A rank's job: do as many stages as may be, each of this rank's share, say to the last bit
    what its share of the whole model says?"""
    placement = Placement(placement.rank, placement.size, placement.collective, ep)
    heads = placement.shard_heads(case.spec.layers[0].attention.num_kv_heads).length
    with kernels(case), torch.inference_mode():
        whole = decoder_of(placement, case)
        driver = Driver(whole, num_kv_heads=heads, kv_format=case.kv_format, num_blocks=64)
        stages = []
        for layers in single(case.spec):
            stage, own = decoder_of(placement, case, layers), stage_groups(driver.groups, layers)
            made = 64, driver.block_size, stage.dtype, stage.device
            kv = KVCache(stage.spec, own, *made, kv_format=case.kv_format, num_kv_heads=heads)
            stages.append((stage, kv))
        work: dict[str, list[int]] = dict(PROMPTS)
        for _ in range(NEW_TOKENS):
            batch, states = driver.batch(work), None
            want = whole.logits(whole.forward(batch, driver.kv))
            for stage, kv in stages:
                states = stage.forward_stage(batch, kv, states)
            assert states is not None
            if not torch.equal(stages[-1][0].logits(states), want):
                return False
            work = {name: [7 + number] for number, name in enumerate(PROMPTS)}
    return len(stages) > 1


def with_sums_in_norms(placement: Placement, case: Case) -> tuple[Share, int]:
    """The same by a collective that sums and norms at once, and how often it did."""
    collective, calls = placement.collective, 0
    assert collective is not None
    plain = collective.all_reduce_norm

    def counted(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "fuses_norms", True)
        patch.setattr(collective, "all_reduce_norm", counted)
        return share_of_work(placement, case, 1, None), calls


def logits_of(share: Share, like: Answer) -> torch.Tensor:
    return torch.frombuffer(bytearray(share.logits), dtype=torch.float32).view(like.logits.shape)


def matrices_of(share: Share) -> Matrices:
    return {
        name: [(row, column, torch.from_numpy(own)) for row, column, own in pieces]
        for name, pieces in share.held.items()
    }


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, of all numbers together."""
    return float((got - want).norm() / want.norm())
