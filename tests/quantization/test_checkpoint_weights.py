"""Matrices that a checkpoint stores come into a layer as they are, whatever stands beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.quantization_scheme import Scheme, tensors_of
from ridgeline.distributed.placement import Placement, Shard
from ridgeline.errors import ConfigError
from ridgeline.kernels.small_linear import Fusion
from ridgeline.layers.linear import Linear, Part
from ridgeline.quantization import open_weight_format
from ridgeline.quantization.checkpoint_weights import DTYPES, CheckpointWeights
from ridgeline.quantization.contract import MatrixShare
from tests.architectures.configs import config
from tests.distributed.alone import Alone
from tests.quantization.stored_cases import Case, awq, gptq, make_case, pack_quantized

CPU = torch.device("cpu")
INPUTS = 64
Tensors = dict[str, torch.Tensor]


def layer(
    parts: Sequence[tuple[str, Scheme | None, Tensors]],
    *,
    rank: int = 0,
    size: int = 1,
    by_columns: bool = False,
    rows: int = 32,
    inputs: int = INPUTS,
    dtype: torch.dtype = torch.float32,
) -> Linear:
    """Filled and finished: what a decoder does with the tensors of a checkpoint."""
    placement = Placement(rank, size, Alone() if size > 1 else None)
    known = {f"{name}.weight": scheme for name, scheme, _ in parts if scheme is not None}
    held = rows if by_columns else rows // size
    columns = Shard(rank * inputs // size, inputs // size) if by_columns else None
    share = Shard(0 if by_columns else rank * held, held)
    made = Linear(
        [Part(f"{name}.weight", None, share) for name, *_ in parts],
        inputs,
        weight_format=CheckpointWeights(known),
        dtype=dtype,
        device=CPU,
        placement=placement,
        columns=columns,
    )
    tensors = {f"{name}.{k}": v for name, _, own in parts for k, v in own.items()}
    for piece in made.pieces():
        whole = tensors[piece.name]
        if piece.dim is not None:
            whole = whole.narrow(piece.dim, piece.start, piece.target.shape[piece.dim])
        assert whole.shape == piece.target.shape, piece.name
        piece.target.copy_(whole)
    made.finish()
    return made


def check(made: Linear, weight: torch.Tensor) -> None:
    """Bit for bit the numbers, and a product with them as near as rounding of x to 8 bits is."""
    got = made.format.dequantize(made.parameters).float()
    assert torch.equal(got, weight)
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1))
    wanted = x @ weight.T
    error = (made(x) - wanted).abs().max() / wanted.abs().max()
    assert error < 0.02


def scheme_of(case: Case, layout: str, **more: Any) -> tuple[Scheme, Tensors]:
    symmetric = more.pop("symmetric", False)
    if layout == "pack-quantized":
        tensors = pack_quantized(case, symmetric=symmetric)
    else:
        tensors = awq(case) if layout == "awq" else gptq(case, version=2)
    scale = str(case.scale.dtype).removeprefix("torch.")
    return Scheme(layout, case.bits, 16, not symmetric, scale, **more), tensors


def test_alike_matrices_are_kept_as_one() -> None:
    cases = [make_case(4, seed=seed) for seed in range(3)]
    made = layer([(name, *scheme_of(c, "awq")) for name, c in zip("qkv", cases, strict=True)])
    check(made, torch.cat([case.weight for case in cases]))
    assert not any(name.startswith("1.") for name in made.parameters)


def test_others_are_kept_each_for_itself() -> None:
    four, eight = make_case(4, symmetric=True), make_case(8, symmetric=True)
    plain = torch.randn(32, INPUTS)
    made = layer(
        [
            ("q", *scheme_of(four, "pack-quantized", symmetric=True)),
            ("k", *scheme_of(eight, "pack-quantized", symmetric=True)),
            ("v", None, {"weight": plain}),
        ]
    )
    check(made, torch.cat([four.weight, eight.weight, plain]))
    x = torch.randn(2, INPUTS)
    assert made.format.fused(x, made.parameters, None, Fusion(is_gated=True)) is None


def test_a_bias_belongs_to_all_of_them() -> None:
    four, eight = make_case(4), make_case(8, symmetric=True)
    made = layer(
        [("q", *scheme_of(four, "awq")), ("k", *scheme_of(eight, "gptq_v2", symmetric=True))]
    )
    bias, x = torch.randn(64), torch.randn(3, INPUTS)
    without = made.format.linear(x, made.parameters, None)
    torch.testing.assert_close(made.format.linear(x, made.parameters, bias), without + bias)


def test_columns_in_an_order_of_their_own() -> None:
    cases = [make_case(4, shuffled=True, seed=seed) for seed in range(2)]
    parts = [
        (n, *scheme_of(c, "gptq_v2", act_order=True)) for n, c in zip("qk", cases, strict=True)
    ]
    made = layer(parts)
    check(made, torch.cat([case.weight for case in cases]))
    with pytest.raises(ConfigError, match="act-order"):
        layer(parts[:1], size=2, by_columns=True)


@pytest.mark.parametrize("layout", ["pack-quantized", "awq", "gptq_v2"])
@pytest.mark.parametrize("by_columns", [False, True])
def test_ranks_hold_shares_of_codes(layout: str, by_columns: bool) -> None:
    case = make_case(4)
    part = ("o", *scheme_of(case, layout))
    for rank in range(2):
        made = layer([part], rank=rank, size=2, by_columns=by_columns)
        half = case.weight.chunk(2, 1 if by_columns else 0)[rank]
        assert torch.equal(made.format.dequantize(made.parameters), half)


@pytest.mark.parametrize("layout", ["awq", "gptq_v2", "pack-quantized"])
def test_a_share_that_begins_within_a_group_has_smaller_groups(layout: str) -> None:
    """Columns 24 on, of groups of 16: groups of 8, of which the first is half of one."""
    case = make_case(4, inputs=48)
    own = layer([("o", *scheme_of(case, layout))], rank=1, size=2, by_columns=True, inputs=48)
    assert torch.equal(own.format.dequantize(own.parameters), case.weight[:, 24:])


def test_a_share_that_begins_within_a_word_or_block_is_refused() -> None:
    case = make_case(4, outputs=24)
    with pytest.raises(ConfigError, match=r"o.weight, stored as awq, .* within a block or a word"):
        layer([("o", *scheme_of(case, "awq"))], rank=1, size=2, rows=24)


def test_tensors_that_contradict_the_config_are_refused_by_name() -> None:
    case = make_case(4)
    scheme, tensors = scheme_of(case, "gptq_v2", symmetric=True)
    with pytest.raises(ConfigError, match=r"o.weight: config.json says sym"):
        layer([("o", scheme, tensors)])


@pytest.mark.parametrize("rows", [128, 32])
def test_blocks_of_e4m3(rows: int) -> None:
    """Those of 128 x 128 are kept; a matrix that ends within a block is not joined to the next."""
    noise = torch.Generator().manual_seed(5)
    scheme = Scheme("fp8", 8, 128, scale_dtype="float32", block_rows=128, keeps="blocks")
    parts, wanted = [], []
    for name in "qk":
        codes = torch.randn(rows, 256, generator=noise).to(torch.float8_e4m3fn)
        scale = 0.01 + torch.rand(1, 2, generator=noise)
        parts.append((name, scheme, {"weight": codes, "weight_scale_inv": scale}))
        wanted.append(codes.float() * scale.repeat_interleave(128, 1))
    made = layer(parts, rows=rows, inputs=256)
    check(made, torch.cat(wanted))
    size = sum(tensor.nbytes for tensor in made.tensors())
    assert size == 2 * (rows * 256 + scheme.beside_bytes(rows, 256))


@pytest.mark.parametrize("deterministic", [False, True])
def test_by_itself_it_is_plain(deterministic: bool) -> None:
    opened = open_weight_format("checkpoint", deterministic=deterministic)
    assert opened.name == "checkpoint"
    assert isinstance(opened, CheckpointWeights)
    assert opened.of([], torch.float32).name == "plain"
    of_plain = opened.of_model(read_spec(config("llama")))
    share = MatrixShare("model.layers.0.mlp.up_proj.weight", 0, 80, 0, 64, True)
    assert of_plain.of([share], torch.float32).name == "plain"


def test_every_tensor_of_a_description_has_a_dtype() -> None:
    for layout in ("pack-quantized", "int-quantized", "gptq", "awq"):
        for raw in tensors_of(Scheme(layout, 4, 16, True, "float16", act_order=True)):
            assert set(raw.dtypes) <= DTYPES.keys()
