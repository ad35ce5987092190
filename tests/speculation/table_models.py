"""How do tests decode with drafts, many requests at once, from models that are tables?

A model's logits depend on the two tokens before. Each sample is a request of its own that goes
through whole steps: drafts, check, the walk over what is accepted, until it has three new tokens.
Letters: N samples, k drafts, V vocabulary, X what is known to follow a row's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch

from ridgeline.kernels.draw_rows import Draws, draw_rows
from ridgeline.kernels.noise import draft_keys
from ridgeline.kernels.verified_rows import DraftOdds, verified_rows, verified_rows_reference
from ridgeline.request import SamplingParams
from ridgeline.sampling.batch import build_batch
from ridgeline.sampling.penalties import PenaltyCounts
from ridgeline.sampling.row import Needs, SamplingRow, sampling_row
from ridgeline.speculation.verify import (
    RunRows,
    VerifiedRun,
    build_run,
    is_verified_by_odds,
    verify_run,
)
from tests.sampling.build import upload
from tests.sampling.test_distributions import expected

PROMPT = (1, 0, 2, 1)
NUM_NEW = 3


@dataclass(frozen=True)
class Tables:
    """Logits [V, V, V] of target and draft, by the two tokens before."""

    target: torch.Tensor
    draft: torch.Tensor

    @property
    def vocab_size(self) -> int:
        return len(self.target)


def tables(vocab_size: int, seed: int, *, likeness: float = 0.5, sharpness: float = 1.5) -> Tables:
    """`likeness` 1: the draft is the target."""
    rng = torch.Generator().manual_seed(seed)
    shape = (vocab_size,) * 3
    target, other = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    draft = likeness * target + (1 - likeness) * other
    return Tables(target * sharpness, draft * sharpness)


def exact_law(models: Tables, params: SamplingParams, num_new: int = NUM_NEW) -> torch.Tensor:
    """[V ** num_new]: how likely each continuation of the prompt is, by plain sampling."""
    vocab_size = models.vocab_size

    def conditional(output: tuple[int, ...]) -> torch.Tensor:
        before = (*PROMPT, *output)
        logits = models.target[before[-2], before[-1]].tolist()
        return expected(logits, params, PROMPT, output).double()

    law = torch.ones(1, dtype=torch.float64)
    for length in range(num_new):
        odds = [conditional(output) for output in product(range(vocab_size), repeat=length)]
        law = (law.unsqueeze(1) * torch.stack(odds)).flatten()
    return law


def p_value(observed: torch.Tensor, law: torch.Tensor, least: float = 8.0) -> float:
    """Pearson's chi-square; what is expected less than `least` times is put together. 0 if what
    cannot happen has happened."""
    if int(observed[law <= 0].sum()):
        return 0.0
    want = law * int(observed.sum())
    is_rare = want < least
    seen = torch.cat([observed[~is_rare].double(), observed[is_rare].sum().double().view(1)])
    wanted = torch.cat([want[~is_rare], want[is_rare].sum().view(1)])
    if float(wanted[-1]) < least:  # too rare even together: with the rarest of the others
        seen = torch.cat([seen[:-2], seen[-2:].sum().view(1)])
        wanted = torch.cat([wanted[:-2], wanted[-2:].sum().view(1)])
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@dataclass
class Samples:
    """N requests that sample alike, each with a noise of its own. Without a seed in `params` their
    names decide it; with one, sample i has the seed plus i."""

    models: Tables
    params: SamplingParams
    num: int
    rows: list[SamplingRow] = field(init=False)
    counts: PenaltyCounts = field(init=False)
    tokens_NL: torch.Tensor = field(init=False)
    lens_N: torch.Tensor = field(init=False)
    num_emitted: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        seed = self.params.seed
        self.rows = [
            sampling_row(
                f"sample {i}",
                self.params if seed is None else _seeded(self.params, seed + i),
                len(PROMPT),
            )
            for i in range(self.num)
        ]
        self.restart()

    def restart(self) -> None:
        self.counts = PenaltyCounts(self.models.vocab_size, upload, self.num)
        if self.rows[0].needs & Needs.PENALTIES:
            for row in self.rows:
                row.counts_slot = self.counts.open(np.array(PROMPT, np.int64), np.zeros(0))
        self.tokens_NL = torch.zeros(self.num, 64, dtype=torch.int64)
        self.tokens_NL[:, : len(PROMPT)] = torch.tensor(PROMPT)
        self.lens_N = torch.full((self.num,), len(PROMPT))
        self.num_emitted = []

    def at(self, offset: int) -> torch.Tensor:
        """[N]: tokens so far behind the newest (offset 0) or before it."""
        return self.tokens_NL.gather(1, (self.lens_N - 1 + offset).unsqueeze(1)).squeeze(1)

    def logits(self, table: torch.Tensor, runs_NX: torch.Tensor, place: int) -> torch.Tensor:
        """[N, V] after the first `place` tokens of these runs, which follow a row's tokens."""
        known_NX = torch.cat([self.at(-1)[:, None], self.at(0)[:, None], runs_NX], 1)
        return table[known_NX[:, place], known_NX[:, place + 1]]

    def accept(self, ids_Nq: torch.Tensor, drafts_Nk: torch.Tensor) -> None:
        """The walk: a row gets its tokens up to the first that was not drafted."""
        num_draft_tokens = drafts_Nk.shape[1]
        is_right_Nk = (ids_Nq[:, :num_draft_tokens] == drafts_Nk).long()
        num_N = 1 + is_right_Nk.cumprod(1).sum(1)
        given_Nq = ids_Nq.where(torch.arange(num_draft_tokens + 1) < num_N[:, None], -1)
        for j in range(num_draft_tokens + 1):
            at_N1 = (self.lens_N + j).unsqueeze(1)
            is_in_N1 = (given_Nq[:, j] >= 0).unsqueeze(1)
            old_N1 = self.tokens_NL.gather(1, at_N1)
            self.tokens_NL.scatter_(1, at_N1, given_Nq[:, j : j + 1].where(is_in_N1, old_N1))
        if self.rows[0].needs & Needs.PENALTIES:
            slots_N = torch.tensor([row.counts_slot for row in self.rows])
            self.counts.add_run(slots_N, given_Nq)
        self.lens_N += num_N
        self.num_emitted.append(num_N)

    def run(self, step: Step, ks: Sequence[int]) -> torch.Tensor:
        """[N, 3]: the first tokens of each, by steps with `ks` drafts, over and over."""
        self.restart()
        for k in _forever(ks):
            step(self, k)
            if int(self.lens_N.min()) >= len(PROMPT) + NUM_NEW:
                return self.tokens_NL[:, len(PROMPT) : len(PROMPT) + NUM_NEW]
        raise AssertionError("never ends")

    def histogram(self, step: Step, ks: Sequence[int]) -> torch.Tensor:
        """How often each continuation came out, as `exact_law` orders them."""
        size, index_N = self.models.vocab_size, torch.zeros(self.num, dtype=torch.int64)
        for token_N in self.run(step, ks).unbind(1):
            index_N = index_N * size + token_N
        return torch.bincount(index_N, minlength=size**NUM_NEW)


Step = Callable[[Samples, int], None]
DraftRunner = Callable[[Samples, int], tuple[torch.Tensor, torch.Tensor | None]]


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return params.replace(seed=seed)


def _forever(ks: Sequence[int]) -> Iterator[int]:
    while True:
        yield from ks


def draws_of(rows: Sequence[SamplingRow], vocab_size: int) -> Draws | None:
    filters = build_batch(rows, vocab_size, upload).filters
    return None if filters is None else filters.draws


def drafted(samples: Samples, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """([N, k], [N, k, V]): drafts of the draft, drawn as draft methods draw them."""
    draws = draws_of(samples.rows, samples.models.vocab_size)
    if draws is not None:
        is_seeded_N = torch.tensor([row.params.seed is not None for row in samples.rows])
        keys_N = draft_keys(draws.keys_R, is_seeded_N)
        draws = Draws(keys_N, draws.temperatures_R, draws.noisy_R)
    drafts_Nk, logits = torch.zeros(samples.num, 0, dtype=torch.int64), []
    for j in range(k):
        logits.append(samples.logits(samples.models.draft, drafts_Nk, j))
        ids_N, _ = draw_rows(logits[-1], samples.lens_N + j, draws)
        drafts_Nk = torch.cat([drafts_Nk, ids_N[:, None]], 1)
    return drafts_Nk, torch.stack(logits, 1)


def chosen(samples: Samples, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Drafts that depend on the tokens before alone."""
    size = samples.models.vocab_size
    draft_tokens = [(samples.at(0) * 3 + samples.at(-1) + 2 * j) % size for j in range(k)]
    return torch.stack(draft_tokens, 1), None


def target_logits(samples: Samples, drafts_Nk: torch.Tensor) -> torch.Tensor:
    """[N * (k + 1), V]"""
    places = range(drafts_Nk.shape[1] + 1)
    table = samples.models.target
    return torch.stack([samples.logits(table, drafts_Nk, j) for j in places], 1).flatten(0, 1)


def _positions(samples: Samples, k: int) -> torch.Tensor:
    return (samples.lens_N[:, None] + torch.arange(k + 1)).flatten()


def general_step(drafter: DraftRunner = drafted) -> Step:
    """By `verify_run`."""
    kept: dict[int, RunRows] = {}

    def step(samples: Samples, k: int) -> None:
        size = samples.models.vocab_size
        if k not in kept:
            kept[k] = build_run(samples.rows, [k] * samples.num, size, upload)
        drafts_Nk, logits = drafter(samples, k) if k else (_none(samples), None)
        follows_Nq = torch.cat([drafts_Nk, drafts_Nk.new_zeros(samples.num, 1)], 1)
        run = VerifiedRun(kept[k], _positions(samples, k), follows_Nq.flatten(), logits)
        sampled = verify_run(target_logits(samples, drafts_Nk), run, samples.counts)
        assert bool(sampled.is_sound_R.all())
        samples.accept(sampled.token_ids_R.view(-1, k + 1), drafts_Nk)

    return step


def captured_step(drafter: DraftRunner = drafted, *, is_reference: bool = False) -> Step:
    """By `verified_rows`, or its reference: greedy, or a temperature alone."""

    def step(samples: Samples, k: int) -> None:
        drafts_Nk, logits = drafter(samples, k) if k else (_none(samples), None)
        draws = draws_of(samples.rows, samples.models.vocab_size)
        if draws is not None:
            each = (draws.keys_R, draws.temperatures_R, draws.noisy_R)
            draws = Draws(*(x.repeat_interleave(k + 1) for x in each))
        odds = None
        if logits is not None:
            is_verified_N = torch.tensor([is_verified_by_odds(row) for row in samples.rows])
            odds = DraftOdds(drafts_Nk, logits, is_verified_N)
        positions_T = _positions(samples, k)
        logits_TV = target_logits(samples, drafts_Nk)
        if is_reference and draws is not None and odds is not None:
            ids_T, is_sound_T = verified_rows_reference(logits_TV, positions_T, draws, odds)
        else:
            ids_T, is_sound_T = verified_rows(logits_TV, positions_T, draws, odds)
        assert bool(is_sound_T.all())
        samples.accept(ids_T.view(-1, k + 1), drafts_Nk)

    return step


def _none(samples: Samples) -> torch.Tensor:
    return torch.zeros(samples.num, 0, dtype=torch.int64)
