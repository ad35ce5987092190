"""Do the stages of a pipeline say together what one process says? In real processes."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError, EngineLost, RequestFault
from ridgeline.request import Request
from tests.distributed.prepared import prepared
from tests.layers.reference_models import ReferenceModel
from tests.layers.test_agreement import CONFIGS
from tests.test_families import CHOSEN, PROMPTS
from tests.test_ranks import OPTIONS, SHORT, requests, serve
from tests.tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LITTLE: dict[str, Any] = {"num_blocks": SHORT, "max_num_batched_tokens": 64, "max_num_seqs": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def want(folder: Path) -> dict[str, list[int]]:
    with LLM(folder, **OPTIONS) as llm:
        return serve(llm.engine, requests(llm.spec.vocab_size), aborts=False)


@pytest.fixture(scope="module")
def three(folder: Path) -> Iterator[LLM]:
    """With little memory, so that requests are preempted."""
    with LLM(folder, pp=3, **LITTLE, **OPTIONS) as llm:
        yield llm


def check_engine(llm: LLM, want: dict[str, list[int]]) -> None:
    """In random batches: shared prefixes, chunks, preemptions, forks, log-probabilities, aborts."""
    assert serve(llm.engine, requests(llm.spec.vocab_size), aborts=False) == want
    got = serve(llm.engine, requests(llm.spec.vocab_size), aborts=True)
    cut = [name for name in want if got[name] != want[name]]
    assert 0 < len(cut) < len(want)
    assert all(got[name] == want[name][: len(got[name])] for name in cut)
    assert llm.engine.scheduler.num_preemptions > 3


def test_three_stages(three: LLM, want: dict[str, list[int]]) -> None:
    check_engine(three, want)


def test_stages_of_two_ranks(folder: Path, want: dict[str, list[int]]) -> None:
    with LLM(folder, tp=2, pp=2, **LITTLE, **OPTIONS) as llm:
        check_engine(llm, want)


def test_several_steps_are_on_the_way(three: LLM) -> None:
    """The last of three stages has an older step than the first."""
    engine, rng = three.engine, random.Random(3)
    for number in range(6):
        prompt = tuple(rng.randrange(200) for _ in range(5))
        engine.add(Request(f"w{number}", prompt, GREEDY, 0.0))
    seen = []
    while not engine.is_idle:
        engine.launch()
        seen.append(engine.num_in_flight)
        if engine.num_in_flight == engine.max_in_flight or engine.launch() is None:
            engine.collect()
    assert max(seen) == engine.max_in_flight == 4


def test_what_is_decided_and_refused(three: LLM, folder: Path) -> None:
    said = {decision.field: decision.got for decision in three.resolved.decisions}
    assert said["pp"] == "3"
    stages = three.resolved.stages
    assert [stages[0][0], stages[-1][1]] == [0, 4]
    assert all(one[1] == other[0] for one, other in pairwise(stages))
    asked = Request("p", (1, 2, 3), SamplingParams(max_tokens=1, prompt_logprobs=1), 0.0)
    with pytest.raises(RequestFault, match=r"prompt_logprobs need all layers .* with pp 1"):
        three.engine.add(asked)
    with pytest.raises(RequestFault, match="scores need all layers"):
        three.logits([1, 2, 3])
    for options, words in (
        ({"pp": 5}, "pp is 5; the model has only 4 layers"),
        ({"pp": 2, "speculate": "ngram"}, "no captured step can wait .* leave out pp"),
        ({"pp": 2, "implementation": "transformers"}, "tp 1 and pp 2 needs native layers"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(folder, **{**OPTIONS, **options})


def test_memory_is_that_of_the_fullest_stage(three: LLM, folder: Path) -> None:
    with LLM(folder, **OPTIONS) as one:
        whole = {row.what: row.predicted for row in one.memory}
    stage = {row.what: row.predicted for row in three.memory}
    assert whole["weights"] / 3 < stage["weights"] < whole["weights"] / 1.5


def test_a_beam_search(three: LLM, folder: Path) -> None:
    """Beams are led by the host, from log-probabilities of the last stage."""
    asked = SamplingParams(max_tokens=6, beam_width=3, n=3, ignore_eos=True)
    with LLM(folder, **OPTIONS) as one:
        want = one.generate([[5, 6, 7]], asked, progress=False)[0]
    got = three.generate([[5, 6, 7]], asked, progress=False)[0]
    assert [beam.token_ids for beam in got.outputs] == [beam.token_ids for beam in want.outputs]


def test_a_stage_that_is_killed(folder: Path) -> None:
    with LLM(folder, pp=2, **OPTIONS) as llm:
        llm.generate([[1, 2, 3]], GREEDY, progress=False)
        ranks = llm.built.ranks
        assert ranks is not None
        hello = ranks._members[1].hello
        assert hello is not None
        os.kill(hello.pid, signal.SIGKILL)
        with pytest.raises(EngineLost, match=r"rank 1 .* has ended"):
            llm.generate([[1, 2, 3]], GREEDY, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", CHOSEN)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_family(family: str, tp: int, tmp_path: Path) -> None:
    reference = ReferenceModel(CONFIGS[CHOSEN[family]], seed=3)
    (tmp_path / "config.json").write_text(json.dumps(reference.config))
    tensors = {name: tensor.contiguous() for name, tensor in reference.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with prepared(), LLM(tmp_path, pp=2, tp=tp, **OPTIONS | {"block_size": 4}) as llm:
        got = llm.generate(PROMPTS, GREEDY, progress=False)
    want = [reference.greedy(prompt, 24) for prompt in PROMPTS]
    assert [list(one.token_ids) for one in got] == want
