"""An executor that drafts gives the tokens of one that does not: any method, any number of
drafts, one or two steps in flight, whatever the rows want."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from ridgeline.executor.drafter import Drafting
from ridgeline.executor.local import LocalExecutor
from ridgeline.kernels.drafts import History, put_drafts
from ridgeline.layers.decoder import Decoder
from ridgeline.request import UNKNOWN_TOKEN, SamplingParams
from ridgeline.speculation.contract import DraftMethod, DraftStep
from ridgeline.speculation.prompt_lookup import NGram
from ridgeline.step import ScheduledRequest, StepFuture, StepPlan
from tests.captures import captures
from tests.executor.rig import VOCAB, Host, alone, device, make_decoder, make_executor

MOST = 4
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60),
    "seeded": SamplingParams(seed=3, temperature=1.5, max_tokens=60),
    "filtered": SamplingParams(seed=4, top_k=20, top_p=0.9, min_p=0.02, max_tokens=60),
    "penalised": SamplingParams(
        temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3,
        max_tokens=60,
    ),
    "biased": SamplingParams(
        seed=5, logit_bias={3: 4.0, 9: -100.0}, min_tokens=6, stop_token_ids=[3], max_tokens=60
    ),
}  # fmt: skip


@cache
def decoder() -> Decoder:
    return make_decoder(hidden_size=24, head_dim=16, num_hidden_layers=2)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@cache
def expected(name: str, seed: int, length: int, num: int) -> list[int]:
    return alone(decoder(), prompt(seed, length), KINDS[name], num, name)


class Told(DraftMethod):
    """Drafts what a test says comes next after these tokens, and now and then something else."""

    name = "told"
    max_draft_tokens = MOST

    def __init__(self, says: Callable[[list[int]], list[int]], wrong: float, seed: int) -> None:
        self.says, self.wrong, self.rng = says, wrong, random.Random(seed)

    def draft(self, step: DraftStep, num_draft_tokens: int) -> torch.Tensor | None:
        history: History = step.history
        draft_tokens = torch.zeros(len(step.rows_B), num_draft_tokens, dtype=torch.int64)
        for b, row in enumerate(step.rows_B.tolist()):
            known = history.tokens_NL[row, : history.lens_N[row]].tolist()
            right = (self.says(known) + [0] * num_draft_tokens)[:num_draft_tokens]
            for i, token in enumerate(right):
                is_wrong = self.rng.random() < self.wrong
                draft_tokens[b, i] = (token + 1) % VOCAB if is_wrong else token
        for i in range(num_draft_tokens):
            put_drafts(
                draft_tokens[:, i].contiguous().to(step.rows_B.device), step.rows_B, history, i
            )
        return None


def drafting(
    method: DraftMethod, *, max_verified_tokens: int = 64, **changes: Any
) -> LocalExecutor:
    """What a `Told` says is known to the host alone, which a captured step does not ask."""
    return make_executor(
        decoder(),
        max_captured_rows=8,
        drafting=Drafting(method, max_verified_tokens),
        is_captured=not isinstance(method, Told),
        **changes,
    )


class DraftRunner:
    """A host that plans with upper bounds, as the scheduler does."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.host = Host(executor)
        self.executor = executor
        self.flying: list[tuple[StepPlan, StepFuture]] = []
        self.num_right = 0
        self.num_verified = 0

    def step(self, work: dict[str, int]) -> None:
        """So many drafts for each of these rows."""
        host, scheduled = self.host, []
        for name, k in work.items():
            held = host.held[name]
            start = held.num_computed
            held.num_computed += k + 1
            size = self.executor.block_size
            more = -(-held.num_computed // size) - len(held.tables[0])
            added = [host._take() for _ in range(more)]
            held.tables[0] += added
            held.tokens += [-1] * (k + 1)
            scheduled.append(ScheduledRequest(name, start, k + 1, (tuple(added),), True, k))
        host.num_steps += 1
        plan = StepPlan(host.num_steps, tuple(scheduled))
        self.flying.append((plan, self.executor.submit(plan)))

    def land(self) -> None:
        plan, future = self.flying.pop(0)
        result = future.result()
        for entry in plan.scheduled:
            got, held = result.token_ids[entry.request_id], self.host.held[entry.request_id]
            assert 1 <= len(got) <= entry.num_draft + 1
            at = held.tokens.index(-1)
            held.tokens[at : at + entry.num_draft + 1] = got
            held.num_computed -= entry.num_draft + 1 - len(got)
            verified, right = result.verified.get(entry.request_id, (0, 0))
            assert right == len(got) - 1 if entry.num_draft and verified else True
            self.num_verified += verified
            self.num_right += right

    def run(self, names: list[str], ks: list[int], in_flight: int, rng: random.Random) -> None:
        for k in ks:
            self.step({name: rng.randint(0, k) if k else 0 for name in names})
            if len(self.flying) == in_flight:
                self.land()
        while self.flying:
            self.land()


def started(executor: LocalExecutor, names: list[str]) -> DraftRunner:
    drafter = DraftRunner(executor)
    host = drafter.host
    for i, name in enumerate(names):
        host.add(name, prompt(i, 9 + 2 * i), KINDS[name])
    host.run({name: 9 + 2 * i for i, name in enumerate(names)})
    return drafter


def truths(names: list[str], num: int) -> Callable[[list[int]], list[int]]:
    """The continuation of whoever has these tokens."""
    whole = [prompt(i, 9 + 2 * i) + expected(n, i, 9 + 2 * i, num) for i, n in enumerate(names)]

    def says(known: list[int]) -> list[int]:
        for tokens in whole:
            if tokens[: len(known)] == known:
                return tokens[len(known) :]
        return []

    return says


@captures
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("names", [["greedy"], ["greedy", "seeded"], list(KINDS)])
def test_same_tokens_as_without_drafts(names: list[str], wrong: float, in_flight: int) -> None:
    method = Told(truths(names, 60), wrong, seed=7)
    drafter = started(drafting(method), names)
    rng = random.Random(len(names))
    drafter.run(names, [MOST, 0, 2, MOST, 1, 0, 0, 3, MOST], in_flight, rng)
    for i, name in enumerate(names):
        got = drafter.host.output(name)
        want = expected(name, i, 9 + 2 * i, 60)[: len(got)]
        assert got[: len(want)] == want, name
    if wrong == 0.0:
        assert drafter.num_right > 5 * len(names)
    if wrong == 1.0:
        assert drafter.num_right == 0
        assert drafter.num_verified > 0


@captures
@pytest.mark.parametrize("in_flight", [1, 2])
def test_looked_up(in_flight: int) -> None:
    names = list(KINDS)
    executor = drafting(NGram(device().torch_device, 8, MOST))
    drafter = started(executor, names)
    drafter.run(names, [MOST] * 10, in_flight, random.Random(0))
    for i, name in enumerate(names):
        got = drafter.host.output(name)
        want = expected(name, i, 9 + 2 * i, 60)[: len(got)]
        assert got[: len(want)] == want, name


@captures
def test_prompts_join_while_the_host_does_not_know_how_long_rows_are() -> None:
    names = list(KINDS)
    method = Told(truths(names, 60), 0.2, seed=1)
    drafter = started(drafting(method), names)
    host = drafter.host
    drafter.step(dict.fromkeys(names, MOST))
    late = prompt(77, 14)
    host.add("late", late, KINDS["greedy"])
    # Every row decodes with drafts, which are left aside, and a prompt is read.
    plan = host.plan({"late": 14})
    entries = list(plan.scheduled)
    for name in names:
        held = host.held[name]
        start, size = held.num_computed, drafter.executor.block_size
        held.num_computed += 3
        more = -(-held.num_computed // size) - len(held.tables[0])
        added = [host._take() for _ in range(more)]
        held.tables[0] += added
        held.tokens += [-1] * 3
        entries.append(ScheduledRequest(name, start, 3, (tuple(added),), True, 2))
    plan = StepPlan(plan.step_id, tuple(entries), plan.new)
    drafter.flying.append((plan, drafter.executor.submit(plan)))
    drafter.land()
    drafter.land()
    drafter.run([*names, "late"], [MOST] * 4, 2, random.Random(5))
    assert host.output("late") == alone(decoder(), late, KINDS["greedy"], len(host.output("late")))
    for i, name in enumerate(names):
        got = host.output(name)
        want = expected(name, i, 9 + 2 * i, 60)[: len(got)]
        assert got[: len(want)] == want, name


@captures
@pytest.mark.parametrize("in_flight", [1, 2])
def test_more_rows_than_a_captured_step_has(in_flight: int) -> None:
    """They are answered without drafts; when some have left, the others go on with theirs."""
    names = [f"row {i}" for i in range(11)]
    kinds = dict.fromkeys(names, KINDS["greedy"])
    executor = drafting(NGram(device().torch_device, 8, MOST), max_verified_tokens=8)
    drafter = DraftRunner(executor)
    host = drafter.host
    for i, name in enumerate(names):
        host.add(name, prompt(i, 5 + i), kinds[name])
    host.run({name: 5 + i for i, name in enumerate(names)})
    drafter.run(names, [0] * 4, in_flight, random.Random(3))
    drafter.run(names[:2], [2] * 3, in_flight, random.Random(4))
    for i, name in enumerate(names):
        got = host.output(name)
        assert len(got) >= 5
        assert got == alone(decoder(), prompt(i, 5 + i), kinds[name], len(got)), name


@captures
def test_log_probabilities_of_all_that_came_out() -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=2, max_tokens=60)
    truth = alone(decoder(), prompt(1, 8), sampling, 20)
    says = (prompt(1, 8) + truth).__getitem__
    method = Told(lambda known: says(slice(len(known), None)), 0.3, seed=3)
    drafter = DraftRunner(drafting(method))
    plain = Host(make_executor(decoder()))
    for host in (drafter.host, plain):
        host.add("r", prompt(1, 8), sampling)
        host.run({"r": 8})
    found = []
    for _ in range(4):
        drafter.step({"r": MOST})
        _, future = drafter.flying[0]
        result = future.result()
        found += list(result.logprobs["r"])
        drafter.land()
    for record in found:
        want = plain.run({"r": 1}).logprobs["r"][0]
        assert record.token_id == want.token_id
        assert record.logprob == pytest.approx(want.logprob, abs=1e-4)
        assert [t for t, _ in record.top] == [t for t, _ in want.top]


@captures
def test_a_row_without_finite_logits_fails_alone() -> None:
    names = ["greedy", "seeded"]
    executor = drafting(Told(truths(names, 60), 0.0, seed=0))
    drafter = started(executor, names)
    row = executor._rows.get("greedy")
    assert row is not None
    block = drafter.host.held["greedy"].tables[0][0]
    for layer in executor._kv.layers:
        assert layer.views is not None
        layer.views.k_NSKD[block].fill_(torch.nan)
    drafter.step(dict.fromkeys(names, 2))
    _, future = drafter.flying.pop()
    result = future.result()
    assert "finite" in result.faults["greedy"]
    assert "greedy" not in result.token_ids
    assert result.token_ids["seeded"] == tuple(expected("seeded", 1, 11, 60)[1:4])


def test_what_the_host_learns_of_drafts() -> None:
    executor = drafting(NGram(device().torch_device, 8, MOST))
    host = Host(executor)
    host.add("r", [5, 6, 7, 8] * 4, KINDS["greedy"])
    result = executor.submit(host.plan({"r": 16})).result()
    assert set(result.draft_token_ids["r"]) <= {UNKNOWN_TOKEN}
    assert len(result.draft_token_ids["r"]) <= MOST
