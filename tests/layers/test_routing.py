"""The router chooses as the routers of Hugging Face Transformers do, rule by rule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v2 import configuration_deepseek_v2, modeling_deepseek_v2
from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3
from transformers.models.gpt_oss import configuration_gpt_oss, modeling_gpt_oss

from ridgeline.architectures.spec import ExpertsSpec
from ridgeline.distributed.placement import Placement
from ridgeline.layers.linear import Linear
from ridgeline.layers.routing import Router
from ridgeline.quantization.plain import PlainWeights

WIDTH, EXPERTS = 16, 12


def router(
    spec: ExpertsSpec,
    theirs: Any,
    *,
    deterministic: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Router:
    """With the numbers of `theirs`, a module of Transformers."""
    linear = partial(
        Linear,
        weight_format=PlainWeights(),
        dtype=dtype,
        device=torch.device("cpu"),
        placement=Placement(),
    )
    ours = Router(spec, WIDTH, str, linear, deterministic=deterministic)
    named = {
        "router": theirs.weight,
        "router_bias": getattr(theirs, "bias", None),
        "score_bias": getattr(theirs, "e_score_correction_bias", None),
    }
    for part in ours.parts():
        for piece in part.pieces():
            piece.target.copy_(named[piece.name])
    ours.linear.finish()
    return ours


def agree(ours: Router, theirs: Any) -> None:
    """Weight of every expert for every token, zero where it is not chosen."""
    x_TE = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(5)).to(
        theirs.weight.dtype
    )
    with torch.inference_mode():
        _, weights, experts = theirs(x_TE)
        got = ours.route(x_TE)
    empty = torch.zeros(len(x_TE), EXPERTS)
    want = empty.scatter(1, experts, weights.float())
    torch.testing.assert_close(empty.scatter(1, got.experts_TA, got.weights_TA), want)


def filled(module: Any) -> Any:
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(0.5 * torch.randn(tensor.shape, generator=noise))
    return module


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("groups", "active"), [(1, 1), (3, 2), (4, 3), (6, 2)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_deepseek_v3(groups: int, active: int, renormalize: bool, deterministic: bool) -> None:
    config = configuration_deepseek_v3.DeepseekV3Config(
        hidden_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        n_group=groups,
        topk_group=active,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    theirs = filled(modeling_deepseek_v3.DeepseekV3TopkRouter(config))
    spec = ExpertsSpec(
        EXPERTS,
        3,
        8,
        renormalize=renormalize,
        scoring="sigmoid",
        score_bias=True,
        num_groups=groups,
        num_active_groups=active,
        group_best=2,
        weight_scale=2.5,
    )
    agree(router(spec, theirs, deterministic=deterministic), theirs)


def test_scores_in_float32_of_a_model_in_bfloat16() -> None:
    config = configuration_deepseek_v3.DeepseekV3Config(
        hidden_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    )
    theirs = filled(modeling_deepseek_v3.DeepseekV3TopkRouter(config))
    theirs.weight.data = theirs.weight.data.bfloat16()
    spec = ExpertsSpec(EXPERTS, 3, 8, scoring="sigmoid", score_bias=True, float32_scores=True)
    agree(router(spec, theirs, dtype=torch.bfloat16), theirs)


@pytest.mark.parametrize(("groups", "active"), [(1, 1), (3, 2), (4, 3), (6, 2)])
def test_deepseek_v2(groups: int, active: int) -> None:
    config = configuration_deepseek_v2.DeepseekV2Config(
        hidden_size=WIDTH,
        num_attention_heads=4,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        n_group=groups,
        topk_group=active,
        topk_method="greedy" if groups == 1 else "group_limited_greedy",
        routed_scaling_factor=16.0,
    )
    theirs = filled(modeling_deepseek_v2.DeepseekV2TopkRouter(config))
    spec = ExpertsSpec(EXPERTS, 3, 8, renormalize=False, weight_scale=16.0)
    grouped = replace(spec, num_groups=groups, num_active_groups=active)
    agree(router(grouped, theirs), theirs)


def test_a_softmax_over_the_chosen_is_that_over_all_made_to_sum_to_one() -> None:
    config = configuration_gpt_oss.GptOssConfig(
        hidden_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=4
    )
    make: Any = modeling_gpt_oss.GptOssTopKRouter
    theirs = filled(make(config))
    agree(router(ExpertsSpec(EXPERTS, 4, 8, router_bias=True), theirs), theirs)
