"""Experts that change ranks give what they gave where they were, in every weight format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.distributed.placement import Placement
from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.layers import experts
from ridgeline.layers.experts import Experts
from ridgeline.quantization import integers
from tests.distributed.test_placement import on_ranks
from tests.layers.driving import build_decoder
from tests.layers.reference_models import tiny_config
from tests.layers.test_stacked_experts import PORTABLE

ON_LOAD = [name for name in WEIGHT_FORMATS if name not in ("auto", "checkpoint")]
PAIRS = ((0, 5), (1, 3), (0, 2), (5, 4))  # the last ones move again what has moved


def layer(placement: Placement, weight_format: str, dtype: torch.dtype, family: str) -> Experts:
    config = tiny_config(
        family, hidden_size=128, intermediate_size=128, num_local_experts=6, num_experts_per_tok=2
    )
    spec = read_spec(config, max_model_len=64)
    decoder = build_decoder(
        spec, max_model_len=64, dtype=dtype, weight_format=weight_format, placement=placement,
        device="cpu",
    )  # fmt: skip
    decoder.randomize(3)
    found = decoder.layers[1].feed_forward
    assert isinstance(found, Experts)
    for one in found.experts:  # biases of a random model are zeros
        for linear in one.linears:
            if linear.bias_O is not None:
                linear.bias_O.add_(linear.parameters[next(iter(linear.parameters))].numel() / 1e5)
    return found


def check(
    ranks: int, ep: int, weight_format: str, dtype: torch.dtype, family: str = "mixtral"
) -> None:
    x_TE = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)).to(dtype) / 8

    def work(placement: Placement) -> None:
        one = layer(replace(placement, ep=ep), weight_format, dtype, family)
        want_TE, groups = one.of(x_TE.clone()), list(one.groups)
        first = [[t.clone() for t in e.gate_up.tensors()] for e in one.experts]
        for pair in PAIRS:
            assert one.groups[pair[0]] != one.groups[pair[1]]
            assert one.exchange(*pair)
            groups[pair[0]], groups[pair[1]] = groups[pair[1]], groups[pair[0]]
            assert one.groups == groups
            rank = placement.rank * ep // ranks
            assert sorted(one.numbers) == [n for n, group in enumerate(groups) if group == rank]
            rtol = 2**-6 if dtype == torch.bfloat16 else 1e-5
            atol = rtol * want_TE.abs().max().item()
            torch.testing.assert_close(one.of(x_TE.clone()), want_TE, rtol=rtol, atol=atol)
        now = [e.gate_up.tensors() for e in one.experts]
        changed = [
            any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(*both, strict=True))
            for both in zip(first, now, strict=True)
        ]
        assert all(changed)

    on_ranks(ranks, work)


@pytest.mark.parametrize("weight_format", ON_LOAD)
def test_every_format(weight_format: str) -> None:
    check(2, 2, weight_format, torch.float32)


@pytest.mark.parametrize("weight_format", ["plain", "int4", "int8"])
def test_formats_of_a_cpu(weight_format: str) -> None:
    check(2, 2, weight_format, torch.bfloat16)


def test_experts_that_two_ranks_divide() -> None:
    check(4, 2, "plain", torch.float32)


def test_biases_move_too() -> None:
    check(2, 2, "plain", torch.float32, "gpt_oss")


@pytest.mark.parametrize("weight_format", ["plain", "fp8", "int4-g32-asym"])
def test_stacks_of_a_gpu_stay_where_they_are(
    weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What captured steps read has the same address before and after."""
    monkeypatch.setattr(integers, "LAYOUTS", PORTABLE)
    monkeypatch.setattr(experts, "STACKED_ON", {"cpu", "cuda"})

    def work(placement: Placement) -> None:
        one = layer(replace(placement, ep=2), weight_format, torch.float32, "mixtral")
        before = [t.data_ptr() for e in one.experts for t in e.gate_up.tensors()]
        with torch.inference_mode():
            assert one.exchange(0, 5)
        assert before == [t.data_ptr() for e in one.experts for t in e.gate_up.tensors()]

    on_ranks(2, work)


def test_several_forms_stay() -> None:
    """All ranks see that one rank keeps an expert otherwise; none of them moves anything."""

    def work(placement: Placement) -> None:
        one = layer(replace(placement, ep=2), "plain", torch.float32, "mixtral")
        if placement.rank == 1:
            parameters = one.experts[1].down.parameters
            parameters["weight"] = parameters["weight"].double()
        numbers = list(one.numbers)
        assert not one.exchange(0, 5)
        assert one.numbers == numbers

    on_ranks(2, work)
