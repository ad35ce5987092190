"""Stages of a pipeline, one after the other, are the whole model to the last bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest
import torch

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.architectures.counts import (
    kv_bytes_per_token,
    num_active_parameters,
    num_parameters,
    step_flops,
    weight_bytes,
)
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import TRANSFORMERS, ModelSpec
from ridgeline.architectures.stages import cut, may_begin, stage_groups, stage_spec
from ridgeline.architectures.tensor_layouts import checkpoint_shapes
from ridgeline.attention.layout import LogitsIndices
from ridgeline.errors import ConfigError
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.piece import RandomSource
from tests.layers.driving import Driver, build_decoder
from tests.layers.reference_models import VOCAB, tiny_config
from tests.layers.test_agreement import CONFIGS
from tests.layers.test_shared_caches import CASES, cla
from tests.test_families import CHOSEN

TINY = {name: CONFIGS[name] for name in CHOSEN.values()}
TINY |= {name: CASES[name][0] for name in ("in pairs", "in threes", "last layers", "by window")}
LENGTHS = ({"a": 19, "b": 7}, {"a": 1, "b": 3, "c": 11}, {"a": 1, "b": 1, "c": 1})


class Uneven(RandomSource):
    """Norms and biases differ too."""

    def tensor(self, name: str) -> torch.Tensor:
        values = super().tensor(name)
        if values.dim() > 1:
            return values.mul_(10)
        noise = torch.Generator().manual_seed(sum(n * b for n, b in enumerate(name.encode())))
        return values + torch.randn(values.shape, generator=noise).mul(0.2).to(values)


def made(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    decoder = build_decoder(spec, max_model_len=64, dtype=dtype)
    decoder.load(Uneven(checkpoint_shapes(spec), 7, dtype, decoder.device))
    return decoder


def single(spec: ModelSpec) -> list[range]:
    """As many stages as may be."""
    starts = [layer for layer in range(spec.num_layers) if may_begin(spec, layer)]
    return [range(*both) for both in pairwise((*starts, spec.num_layers))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_stages_are_the_whole_model(name: str, dtype: torch.dtype) -> None:
    spec = read_spec(TINY[name], max_model_len=64)
    whole, groups = made(spec, dtype), kv_groups(spec)
    driver = Driver(whole, poison=False)
    stages = []
    for layers in single(spec):
        stage = made(stage_spec(spec, layers), dtype)
        own = stage_groups(groups, layers)
        stages.append((stage, KVCache(stage.spec, own, 256, 4, dtype, stage.device)))
    assert len(stages) > 1 or name == "last layers"
    rng = Random(name)
    for index, lengths in enumerate(LENGTHS):
        work = {row: [rng.randrange(VOCAB) for _ in range(num)] for row, num in lengths.items()}
        batch = driver.batch(work)
        if index:  # only some of the states are wanted
            where = torch.tensor([0, 2, len(batch.token_ids_T) - 1], device=whole.device)
            batch = replace(batch, logits_indices=LogitsIndices(where))
        want = whole.logits(whole.forward(batch, driver.kv))
        states = None
        for stage, kv in stages:
            states = stage.forward_stage(batch, kv, states)
        assert states is not None
        assert torch.equal(stages[-1][0].logits(states), want)


@pytest.mark.parametrize("name", [*TINY][::3])
def test_the_parts_of_a_stage_add_up(name: str) -> None:
    spec = read_spec(TINY[name], max_model_len=64)
    stages = [stage_spec(spec, layers) for layers in single(spec)]
    twice = spec.vocab_size * spec.hidden_size if spec.tie_embeddings else 0
    assert sum(map(num_parameters, stages)) == num_parameters(spec) + twice
    tensors: dict[str, tuple[int, ...]] = {}
    for stage in stages:
        tensors |= expected_tensors(stage)
    assert tensors == expected_tensors(spec)
    for count in (num_active_parameters, lambda one: kv_bytes_per_token(one, 2)):
        assert sum(map(count, stages)) == count(spec)
    assert sum(weight_bytes(one, 2) for one in stages) == weight_bytes(spec, 2) + 2 * twice
    shape = ((5, 0), (1, 9))
    assert sum(step_flops(one, shape, 2) for one in stages) == step_flops(spec, shape, 2)


def test_what_cannot_be_cut() -> None:
    spec = read_spec(TINY["in pairs"], max_model_len=64)
    with pytest.raises(ConfigError, match="layer 1 reads the keys and values of layer 0, so no st"):
        stage_spec(spec, range(1, 4))
    with pytest.raises(ConfigError, match=r"pp is 9; .* cannot be cut into so many stages"):
        cut(spec, 9, lambda layers: 1.0)
    with pytest.raises(ConfigError, match="which runs all of them; use pp 1"):
        stage_spec(replace(spec, implementation=TRANSFORMERS), range(1))


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_stage_is_as_fast_as_may_be(seed: int) -> None:
    """Against all cuts there are."""
    rng = Random(seed)
    config = tiny_config(
        "llama", num_hidden_layers=rng.randint(4, 8), **cla(rng.choice([1, 1, 2, 3]))
    )
    spec = read_spec(config, max_model_len=64)
    times = [rng.uniform(1, 3) for _ in spec.layers]
    ends = [rng.uniform(0, 2), rng.uniform(0, 4)]
    room = rng.choice([2, 3, 9])

    def seconds(layers: range) -> float:
        first, last = layers.start == 0, layers.stop == spec.num_layers
        return sum(times[layers.start : layers.stop]) + first * ends[0] + last * ends[1]

    def fits(layers: range) -> bool:
        return len(layers) <= room

    num = rng.randint(1, 4)
    lawful = []
    for starts in combinations(range(1, spec.num_layers), num - 1):
        stages = [range(*both) for both in pairwise((0, *starts, spec.num_layers))]
        if all(map(fits, stages)) and all(may_begin(spec, start) for start in starts):
            lawful.append(max(map(seconds, stages)))
    if not lawful:
        with pytest.raises(ConfigError, match="cannot be cut into so many"):
            cut(spec, num, seconds, fits)
        return
    found = cut(spec, num, seconds, fits)
    assert [i for layers in found for i in layers] == list(range(spec.num_layers))
    assert len(found) == num
    assert max(map(seconds, found)) == pytest.approx(min(lawful))
