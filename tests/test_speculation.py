"""Drafting changes how long an answer takes, and nothing else: through `LLM`, with real models.

Greedy answers are compared with those of an engine that does not draft. Two different orders of
the same sums may tell two nearly equal logits apart differently: where answers part, the gap there
must be one that rounding explains.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError
from ridgeline.evaluation.problems import problems
from ridgeline.kernels.cpu import native
from ridgeline.llm import GenerationResult
from ridgeline.request import Request
from ridgeline.scheduler.scheduler import DraftLengths
from tests.captures import captures
from tests.conftest import TEST_DEVICE
from tests.thinning import slow

TASKS = ("stories", "lookup", "copy", "json", "chat")
NEAR = 2e-3  # between two logits, in float32
METHODS = ("ngram:4", "suffix:6", "early:3:3", "draft:demo:draft:4", "draft:demo:draft")


@cache
def load(speculate: str) -> LLM:
    return LLM(
        "demo:chat", device=TEST_DEVICE, dtype="float32", speculate=speculate, num_blocks=1500,
        max_num_seqs=16, warm_up="off",
    )  # fmt: skip


def prompts(num: int) -> list[str]:
    """From held-out problems of every task in turn."""
    each = -(-num // len(TASKS))
    texts = [[p.messages[-1].content for p in problems(task, each, 5)] for task in TASKS]
    return [text for row in zip(*texts, strict=True) for text in row][:num]


@cache
def plain_answers(num: int, max_tokens: int) -> list[GenerationResult]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    return load("off").generate(prompts(num), sampling, progress=False)


class Counted(DraftLengths):
    """What a chooser is told, counted on the way."""

    def __init__(self, llm: LLM) -> None:
        self.scheduler = llm.engine.scheduler
        inner = self.scheduler.draft_lengths
        assert inner is not None
        self.inner: DraftLengths = inner
        super().__init__(self.inner.num_draft_tokens)
        self.num_verified = self.num_right = self.num_steps = 0

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        return self.inner.plan(decoding, now)

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)

    def observe(self, verified: Mapping[str, tuple[int, int]]) -> None:
        for num_verified, num_right in verified.values():
            self.num_verified += num_verified
            self.num_right += num_right
            self.num_steps += num_verified > 0
        self.inner.observe(verified)

    def __enter__(self) -> Counted:
        self.scheduler.draft_lengths = self
        return self

    def __exit__(self, *error: object) -> None:
        self.scheduler.draft_lengths = self.inner


def same_or_tied(plain: GenerationResult, result: GenerationResult) -> bool:
    """True where they part, at two logits that are nearly equal."""
    ours, theirs = result.token_ids, plain.token_ids
    if ours == theirs:
        assert result.finish_reason == plain.finish_reason
        return False
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    logprobs = plain.outputs[0].logprobs
    assert logprobs is not None
    (_, best), (_, second) = logprobs[at].top[:2]
    assert best - second < NEAR, (plain.prompt_token_ids, at)
    return True


def check_greedy(speculate: str, num: int, max_tokens: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    llm = load(speculate)
    with Counted(llm) as counted:
        results = llm.generate(prompts(num), sampling, progress=False)
    pairs = zip(plain_answers(num, max_tokens), results, strict=True)
    ties = sum(same_or_tied(plain, result) for plain, result in pairs)
    print(f"{speculate}: {num} prompts, {ties} near ties, of {counted.num_verified} drafts "
          f"{counted.num_right} right")  # fmt: skip
    assert ties <= max(1, num // 100)
    if ":" in speculate.removeprefix("draft:demo:"):  # else as many as pay, perhaps none
        assert counted.num_right > num / 4


@captures
@pytest.mark.parametrize("speculate", METHODS)
def test_greedy_answers_are_the_same(speculate: str) -> None:
    check_greedy(speculate, 20, 40)


@cache
def bfloat16_answers(speculate: str) -> list[list[int]]:
    """One request at a time: the rows of a step are then those of its drafts."""
    sampling = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=40)
        if i % 2 else SamplingParams(temperature=0.0, max_tokens=40)
        for i in range(20)
    ]  # fmt: skip
    with LLM(
        "demo:chat", device="cpu", dtype="bfloat16", speculate=speculate, num_blocks=500,
        max_num_seqs=1, warm_up="off",
    ) as llm:  # fmt: skip
        return [list(r.token_ids) for r in llm.generate(prompts(20), sampling, progress=False)]


@pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
@pytest.mark.parametrize(
    "speculate",
    [*slow("draft:demo:draft:1", "draft:demo:draft:3"), "draft:demo:draft:6", "ngram:4"],
)
def test_in_bfloat16_on_a_cpu_no_token_differs(speculate: str) -> None:
    """Greedy or seeded: no near tie falls otherwise, as a check gives the logits of single steps.
    Tiles (AMX) add up in another order than vectors do."""
    with native.at_level(min(native.level(), "bf16", key=native.LEVELS.index)):
        assert bfloat16_answers(speculate) == bfloat16_answers("off")


@captures
@pytest.mark.slow
@pytest.mark.parametrize("speculate", METHODS)
def test_a_thousand_greedy_answers_are_the_same(speculate: str) -> None:
    check_greedy(speculate, 1000, 48)


@captures
@pytest.mark.slow
@pytest.mark.parametrize("name", ["babyllama-char105", "babyllama-char105-partner"])
def test_the_pair_says_the_same_to_a_thousand_beginnings(shared: Path, name: str) -> None:
    (other,) = {"babyllama-char105", "babyllama-char105-partner"} - {name}
    packed = shared / "data" / "tinystories-sample" / "tinystories_sample.txt.gz"
    sentences = gzip.decompress(packed.read_bytes()).decode().replace("\n", " ").split(". ")
    texts = [" ".join(sentence.split()[:6]) for sentence in sentences if len(sentence) > 30][:1000]
    assert len(texts) == 1000
    sampling = SamplingParams(temperature=0.0, max_tokens=60, logprobs=2, ignore_eos=True)
    answers = []
    for speculate in ("off", f"draft:{shared / 'models' / other}:4"):
        with LLM(
            str(shared / "models" / name), device=TEST_DEVICE, dtype="float32", num_blocks=2000,
            speculate=speculate, max_num_seqs=16, warm_up="off",
        ) as llm:  # fmt: skip
            answers.append(llm.generate(texts, sampling, progress=False))
    ties = sum(same_or_tied(plain, result) for plain, result in zip(*answers, strict=True))
    print(f"{name}: 1000 prompts, {ties} near ties")
    assert ties <= 10


@captures
@pytest.mark.parametrize("speculate", ["ngram:4", "draft:demo:draft:3"])
def test_a_seed_gives_the_same_tokens(speculate: str) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=40)
    want = load("off").generate(prompts(10), sampling, progress=False)
    got = load(speculate).generate(prompts(10), sampling, progress=False)
    same = sum(a.token_ids == b.token_ids for a, b in zip(want, got, strict=True))
    assert same >= 9  # one may part where two noisy scores are as good as equal


@captures
def test_several_answers_penalties_and_stops() -> None:
    many = [
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=30),
        SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.3, max_tokens=30),
        SamplingParams(temperature=0.7, seed=3, n=3, max_tokens=20),
        SamplingParams(temperature=0.0, stop="the", max_tokens=30),
        SamplingParams(temperature=0.0, min_tokens=25, max_tokens=30, logit_bias={7: -50.0}),
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=20),
    ]
    texts = prompts(len(many))
    want = load("off").generate(texts, many, progress=False)
    got = load("draft:demo:draft:4").generate(texts, many, progress=False)
    for a, b in zip(want, got, strict=True):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        assert [c.text for c in a.outputs] == [c.text for c in b.outputs]
        assert [c.finish_reason for c in a.outputs] == [c.finish_reason for c in b.outputs]
    ours, theirs = got[-1].outputs[0].logprobs, want[-1].outputs[0].logprobs
    assert ours is not None
    assert theirs is not None
    assert [r.logprob for r in ours] == pytest.approx([r.logprob for r in theirs], abs=1e-3)


@captures
def test_the_pair_accepts_what_was_expected(shared: Path) -> None:
    """The reference began to draft behind the prompt's last token and here behind the first token
    of the answer, so that its steps lie otherwise: two drafts more or less of a run."""
    models = shared / "models"
    runs = json.loads((models / "babyllama-char105-partner" / "pair_expected.json").read_text())
    for target in ("babyllama-char105", "babyllama-char105-partner"):
        mine = [run for run in runs["runs"] if run["target"] == target]
        llm = LLM(
            str(models / target), device=TEST_DEVICE, dtype="float32", num_blocks=400,
            speculate=f"draft:{models / mine[0]['draft']}:4", warm_up="off", max_num_seqs=4,
        )  # fmt: skip
        for run in mine:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=run["new_tokens"], ignore_eos=True
            )
            with Counted(llm) as counted:
                (result,) = llm.generate([run["prompt"]], sampling, progress=False)
            assert len(result.token_ids) == run["new_tokens"]
            assert abs(counted.num_right - run["accepted"]) <= 2
            assert abs(counted.num_steps - run["target_steps"]) <= 2
            rate = counted.num_right / (4 * counted.num_steps)
            assert rate == pytest.approx(run["acceptance"], abs=0.04)
        llm.close()


@captures
@pytest.mark.parametrize(
    ("speculate", "words"),
    [
        ("nothing", "unknown speculate"),
        ("ngram:0", "1 .. 16"),
        ("draft", "lacks"),
        ("early:99", "layers"),
        ("draft:demo:nobody", "no bundled model"),
    ],
)
def test_what_cannot_be_asked_for(speculate: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("demo:chat", device=TEST_DEVICE, speculate=speculate, num_blocks=100)


def test_drafts_do_not_go_with_steps_that_are_not_captured() -> None:
    with pytest.raises(ConfigError, match="captured"):
        LLM("demo:moe", device="cpu", dtype="float32", speculate="ngram", num_blocks=100)
