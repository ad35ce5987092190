"""An executor whose KV slots remember what was written to them, and the exact oracle beside it.

The model: the hidden number of position p is a hash of its token, p, the salt and, for each KV
group, all slots of earlier positions that the group's window shows. A slot holds the hidden number
of its position, so it is a digest of everything before it. The device reads slots through the block
tables alone: a wrong table, a missing write, a stale hit, a hit under another salt or an
off-by-one in a window changes the next token. There is no numeric noise to hide in.
Python's hash of tuples of integers does not depend on PYTHONHASHSEED.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.errors import EngineFault
from ridgeline.request import UNKNOWN_TOKEN, SamplingParams, TokenLogprobs
from ridgeline.step import NULL_BLOCK, NewRequest, ScheduledRequest, StepPlan, StepResult

VOCAB = 61  # prime, so that `candidates` never repeats one
GARBAGE = -1  # what a failed step leaves behind
GROUP_MARK = 0x9E3779B97F4A7C1

Windows = tuple[int | None, ...]


class Violation(AssertionError):
    """The engine did what it must never do."""


def demand(condition: bool, what: str, *values: object) -> None:
    if not condition:
        raise Violation(f"{what} {values}" if values else what)


# ---------------------------------------------------------------------- the model


def hidden(token_id: int, position: int, root: int, reads: Sequence[int]) -> int:
    return hash((token_id, position, root, *reads))


def next_token(state: int) -> int:
    return (state >> 3) % VOCAB


def logprob(state: int, token_id: int) -> float:
    return -((hash((state, token_id)) >> 7) % 4096) / 512.0


def candidates(state: int, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest next tokens, likeliest first, no two equally likely."""
    first, stride = (state >> 5) % VOCAB, 1 + (state >> 11) % (VOCAB - 1)
    value, found = -0.01 - ((state >> 23) % 1009) / 2018.0, []
    for i in range(min(count, VOCAB)):
        found.append(((first + i * stride) % VOCAB, value))
        value -= 0.001 + ((state >> (i % 31)) % 509) / 1018.0
    return tuple(found)


class Text:
    """Tokens and the slots that a right execution would have: one list per group."""

    def __init__(self, windows: Windows, root: int) -> None:
        self.windows, self.root = windows, root
        self.token_ids: list[int] = []
        self.states: list[int] = []
        self.slots: list[list[int]] = [[] for _ in windows]

    def push(self, token_id: int) -> int:
        position, reads = len(self.token_ids), []
        for window, slots in zip(self.windows, self.slots, strict=True):
            seen = slots if window is None else slots[max(0, position - window + 1) :]
            reads.append(hash(tuple(seen)))
        state = hidden(token_id, position, self.root, reads)
        self.token_ids.append(token_id)
        self.states.append(state)
        for g, slots in enumerate(self.slots):
            slots.append(state ^ (g * GROUP_MARK))
        return state

    def copy(self) -> Text:
        twin = Text(self.windows, self.root)
        twin.token_ids, twin.states = list(self.token_ids), list(self.states)
        twin.slots = [list(slots) for slots in self.slots]
        return twin


def root_of(salt: bytes) -> int:
    return int.from_bytes(salt, "big") + 1


@dataclass(frozen=True, slots=True)
class Truth:
    """All that a request may deliver, from its prompt alone: no engine, no cache, no batch."""

    output: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()  # of prompt positions 1, 2, ...
    beams: tuple[tuple[tuple[int, ...], float], ...] = ()


def truth_of(
    prompt: Sequence[int], sampling: SamplingParams, salt: bytes, windows: Windows
) -> Truth:
    text = Text(windows, root_of(salt))
    for token_id in prompt:
        text.push(token_id)
    prompt_logprobs = tuple(logprob(text.states[p - 1], prompt[p]) for p in range(1, len(prompt)))
    if sampling.beam_width > 1:
        beams = _beam_truth(text, sampling)
        return Truth(beams[0][0], beams=beams)
    output: list[int] = []
    logprobs: list[float] = []
    state, stop = text.states[-1], frozenset(sampling.stop_token_ids)
    for _ in range(sampling.max_tokens or 0):
        token_id = next_token(state)
        output.append(token_id)
        logprobs.append(logprob(state, token_id))
        if token_id in stop:
            break
        state = text.push(token_id)
    return Truth(tuple(output), tuple(logprobs), prompt_logprobs)


def _beam_truth(text: Text, sampling: SamplingParams) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Beam search over the whole vocabulary, as Transformers describes it, one step at a time."""
    width, start, stop = (
        sampling.beam_width,
        len(text.token_ids),
        frozenset(sampling.stop_token_ids),
    )
    limit = sampling.max_tokens or 0
    keep = max(2, 1 + len(stop)) * width
    live: list[tuple[float, Text]] = [(0.0, text)]
    done: list[tuple[float, tuple[int, ...]]] = []
    while live:
        length = len(live[0][1].token_ids) - start + 1
        scored = [
            (score + value, text, token_id)
            for score, text in live
            for token_id, value in candidates(text.states[-1], VOCAB)
        ]
        scored.sort(key=lambda c: -c[0])
        scored = scored[:keep]
        ended = [c[2] in stop or length == limit for c in scored]
        scale = length**sampling.length_penalty
        for (score, text, token_id), is_end in list(zip(scored, ended, strict=True))[:width]:
            if is_end:
                done.append((score / scale, (*text.token_ids[start:], token_id)))
        done = sorted(done, key=lambda d: -d[0])[:width]
        chosen = [c for c, is_end in zip(scored, ended, strict=True) if not is_end][:width]
        full = len(done) == width
        if not chosen or (full and sampling.early_stopping):
            break
        if full and chosen[0][0] / scale <= done[-1][0]:
            break
        live = []
        for score, text, token_id in chosen:
            longer = text.copy()
            longer.push(token_id)
            live.append((score, longer))
    return tuple((token_ids, score) for score, token_ids in done[: sampling.n])


# ---------------------------------------------------------------------- the device


@dataclass(slots=True)
class Row:
    token_ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    tables: list[list[int]]
    root: int
    truth: Truth | None  # only to make drafts that are sometimes right
    computed: int = -1  # set by the first entry
    draft_tokens: list[int] = field(default_factory=list)
    is_dead: bool = False  # its numbers went wrong; what it does is ignored
    is_stale: bool = False  # a beam that has sampled: the host decides how it goes on
    opened_during: frozenset[int] = frozenset()  # steps of which the host knew no result then
    died_in: int = 0  # the step whose result is the first to say that it is dead
    sampled_in: int = 0  # its newest token


@dataclass(frozen=True, slots=True)
class FakeFuture:
    device: FakeDevice
    step_id: int
    outcome: StepResult | None

    def result(self) -> StepResult:
        self.device.over(self.step_id)
        if self.outcome is None:
            raise EngineFault("the device failed on purpose")
        return self.outcome


class FakeDevice:
    """Executes at submit and remembers which blocks each step in flight touches.

    `step_fault` and `row_fault` are probabilities; `salts` and `truths` are filled by the test.
    """

    def __init__(
        self, num_blocks: int, block_size: int, windows: Windows, num_drafts: int, seed: int
    ) -> None:
        self.num_blocks, self.block_size, self.windows = num_blocks, block_size, windows
        self.num_drafts, self.rng = num_drafts, random.Random(seed)
        self.stages = 1  # a token that the last samples is with the first so many steps later
        self.step_fault = self.row_fault = self.submit_fault = 0.0
        self.num_steps = 0
        self.num_faults = 0
        self.num_row_faults = 0
        self.num_takers_spoiled = 0
        self.num_accepted = 0
        self.empty()

    def empty(self) -> None:
        """As it was before the first step."""
        size = self.block_size
        self.memory: list[list[int | None]] = [[None] * size for _ in range(self.num_blocks + 1)]
        self.rows: dict[str, Row] = {}
        self.salts: dict[str, bytes] = {}
        self.truths: dict[str, Truth] = {}
        self.parents: dict[str, str | None] = {}
        self.faulted: set[str] = set()
        self.spoiled_in: dict[int, int] = {}  # by block: the step whose result tells of it
        self.touched: dict[int, set[int]] = {}  # by step in flight
        self.in_flight: dict[int, StepPlan] = {}
        self.may_resend = False  # after a fault the host may name rows that are gone
        self.is_broken = False  # a step failed and the host has not seen it yet
        self.is_refusing = False

    def submit(self, plan: StepPlan) -> FakeFuture:
        self.num_steps += 1
        if self.is_refusing or self.rng.random() < self.submit_fault:
            self.is_refusing = self.may_resend = True
            self.in_flight[plan.step_id] = plan
            raise EngineFault("the device refused on purpose")
        self._check_blocks(plan)
        self._open_and_close(plan)
        self._copy(plan)
        self.in_flight[plan.step_id] = plan
        if not self.is_broken and self.rng.random() < self.step_fault:
            self.is_broken = self.may_resend = True
        if self.is_broken:
            for entry in plan.scheduled:
                self._append_blocks(self.rows[entry.request_id], entry)
                self._spoil(self.rows[entry.request_id], entry)
            return FakeFuture(self, plan.step_id, None)
        result = StepResult({})
        # Rows with several tokens write before anybody reads. In what order those with one token
        # do is nobody's business, so they do in the most awkward one.
        several = [entry for entry in plan.scheduled if entry.num_tokens > 1]
        single = [entry for entry in plan.scheduled if entry.num_tokens == 1]
        for entry in (*several, *reversed(single)):
            self._run(self.rows[entry.request_id], entry, result)
        return FakeFuture(self, plan.step_id, result)

    def over(self, step_id: int) -> None:
        del self.in_flight[step_id]
        self.touched.pop(step_id, None)

    def recover(self) -> None:
        """The host has seen the fault, and no step is in flight."""
        self.num_faults += 1
        self.in_flight.clear()
        self.touched.clear()
        self.is_broken = self.is_refusing = False

    def _check_blocks(self, plan: StepPlan) -> None:
        """No block is handed out while a step in flight may touch it, and none twice."""
        fresh = [b for e in plan.scheduled for blocks in e.new_block_ids for b in blocks]
        fresh += [copy.target for copy in plan.copies]
        demand(len(set(fresh)) == len(fresh), "a block is handed out once", plan.step_id)
        demand(all(0 < b <= self.num_blocks for b in fresh), "only real blocks are handed out")
        for touched in self.touched.values():
            demand(touched.isdisjoint(fresh), "a step in flight may touch it", plan.step_id)

    def _open_and_close(self, plan: StepPlan) -> None:
        for request_id in (*plan.preempted, *plan.finished):
            row = self.rows.pop(request_id, None)
            demand(row is not None or self.may_resend, "only rows there are close", request_id)
        for new in plan.new:
            demand(new.request_id not in self.rows, "a row opens once", new.request_id)
            demand(UNKNOWN_TOKEN not in new.token_ids, "a row opens with known tokens", new)
            row = self.rows[new.request_id] = self._row(new)
            row.opened_during = frozenset((*self.in_flight, plan.step_id))

    def _row(self, new: NewRequest) -> Row:
        name = new.request_id.partition("/beam-")[0]
        tables = [list(table) for table in new.block_ids]
        root, truth = root_of(self.salts[name]), self.truths[name]
        return Row(list(new.token_ids), new.num_prompt_tokens, new.sampling, tables, root, truth)

    def _copy(self, plan: StepPlan) -> None:
        touched = set()
        for copy in plan.copies:
            table = self.rows[copy.request_id].tables[copy.group]
            demand(table[copy.index] == copy.source, "a copy replaces its source", copy)
            demand(copy.source != NULL_BLOCK, "the null block is never copied", copy)
            self.memory[copy.target] = list(self.memory[copy.source])
            if copy.source in self.spoiled_in:  # its copy is as wrong
                self.spoiled_in[copy.target] = self.spoiled_in[copy.source]
            table[copy.index] = copy.target
            touched.add(copy.source)
        self.touched[plan.step_id] = touched

    def _append_blocks(self, row: Row, entry: ScheduledRequest) -> None:
        for table, new in zip(row.tables, entry.new_block_ids, strict=True):
            table.extend(new)
        if row.computed < 0:
            row.computed = entry.start

    def _spoil(self, row: Row, entry: ScheduledRequest) -> None:
        row.died_in = row.died_in or max(self.in_flight)
        for table in row.tables:
            for position in range(row.computed, entry.start + entry.num_tokens):
                block = table[position // self.block_size]
                self.memory[block][position % self.block_size] = GARBAGE
                self.spoiled_in[block] = row.died_in
        row.is_dead = True

    def _run(self, row: Row, entry: ScheduledRequest, result: StepResult) -> None:
        self._append_blocks(row, entry)
        demand(not row.is_stale, "a beam goes on as the host says", entry)
        slots = self._gather(row, entry)
        bad = any(value == GARBAGE for seen in slots for value in seen)
        if row.is_dead or bad or self.rng.random() < self.row_fault:
            self._check_fault(entry.request_id, row if bad and not row.is_dead else None)
            self._spoil(row, entry)
            result.faults[entry.request_id] = "not a number"
            return
        start, real = row.computed, entry.num_tokens - entry.num_draft
        demand(entry.start == start or entry.start > start >= 0 < self.num_drafts, "start", entry)
        tokens = row.token_ids[start : start + real]
        demand(len(tokens) == real, "only tokens there are", entry, start)
        if start + real == len(row.token_ids) and row.sampled_in in self.in_flight:
            has_come = max(self.in_flight) - row.sampled_in >= self.stages
            demand(has_come, "the token has come back to the first stage", entry)
        demand(entry.samples == (start + real == len(row.token_ids)), "samples at the end", entry)
        fill = [VOCAB - 1] * (entry.num_draft - len(row.draft_tokens))
        draft_tokens = (row.draft_tokens + fill)[: entry.num_draft]
        states = self._compute(row, start, tokens + draft_tokens, slots)
        self._report_prompt(row, entry, states, result)
        rejected = 0
        if entry.samples:
            new = self._sample(row, entry, draft_tokens, states[real - 1 :], result)
            rejected = entry.num_draft + 1 - len(new)
        row.computed = start + entry.num_tokens - rejected

    def _check_fault(self, row_id: str, reader: Row | None) -> None:
        """Only what shares blocks with a row that went wrong may read what it left: a fork, or a
        row that took them when nobody knew yet."""
        name = row_id.partition("/beam-")[0]
        if reader is not None:
            family = (name, self.parents.get(name))
            size = self.block_size
            spoiled = [  # of what it reads; what it has yet to write is of an older life
                table[place // size]
                for table in reader.tables
                for place in range(reader.computed)
                if table[place // size]
                and self.memory[table[place // size]][place % size] == GARBAGE
            ]
            is_early = all(self.spoiled_in[block] in reader.opened_during for block in spoiled)
            is_family = not self.faulted.isdisjoint(family)
            demand(is_early or is_family, "a stranger reads garbage", row_id)
            self.num_takers_spoiled += not is_family
        self.faulted.add(name)
        self.num_row_faults += 1

    def _gather(self, row: Row, entry: ScheduledRequest) -> list[list[int]]:
        """What the windows of the first token show, read through the block tables."""
        size, start, memory = self.block_size, row.computed, self.memory
        end = -(-(start + entry.num_tokens) // size)
        touched = self.touched[max(self.touched)]
        gathered = []
        for window, table in zip(self.windows, row.tables, strict=True):
            low = 0 if window is None else max(0, start - window + 1)
            demand(len(table) >= end, "every token has a slot", entry)
            used = table[low // size : end]
            demand(NULL_BLOCK not in used, "what is needed is there", entry, table)
            touched.update(used)
            values: list[int] = []
            for block in used:
                values += memory[block]  # type: ignore[arg-type]
            first = low - low // size * size
            values = values[first : first + start - low]
            demand(None not in values, "read before write", entry)
            gathered.append(values)
        return gathered

    def _compute(
        self, row: Row, start: int, token_ids: list[int], slots: list[list[int]]
    ) -> list[int]:
        size, memory, states = self.block_size, self.memory, []
        for position, token_id in enumerate(token_ids, start):
            reads = []
            for window, seen in zip(self.windows, slots, strict=True):
                if window is not None and len(seen) >= window:
                    del seen[: len(seen) - window + 1]
                reads.append(hash(tuple(seen)))
            state = hidden(token_id, position, row.root, reads)
            states.append(state)
            index, offset = position // size, position % size
            for g, table in enumerate(row.tables):
                value = state ^ (g * GROUP_MARK)
                memory[table[index]][offset] = value
                slots[g].append(value)
        return states

    def _report_prompt(
        self, row: Row, entry: ScheduledRequest, states: list[int], result: StepResult
    ) -> None:
        if row.sampling.prompt_logprobs is None:
            return
        last = min(row.computed + entry.num_tokens, row.num_prompt - 1)
        result.prompt_logprobs[entry.request_id] = tuple(
            TokenLogprobs(
                row.token_ids[p], logprob(states[p - 1 - row.computed], row.token_ids[p]), 1
            )
            for p in range(row.computed + 1, last + 1)
        )

    def _sample(
        self,
        row: Row,
        entry: ScheduledRequest,
        draft_tokens: list[int],
        states: list[int],
        result: StepResult,
    ) -> list[int]:
        new: list[int] = []
        for i, state in enumerate(states):
            new.append(next_token(state))
            if i < len(draft_tokens) and draft_tokens[i] != new[-1]:
                break
        if row.sampling.beam_width > 1:
            top = candidates(states[0], row.sampling.logprobs or 0)
            result.logprobs[entry.request_id] = (TokenLogprobs(top[0][0], top[0][1], 1, top),)
            row.is_stale = True
        elif row.sampling.logprobs is not None:
            result.logprobs[entry.request_id] = tuple(
                TokenLogprobs(t, logprob(s, t), 1) for t, s in zip(new, states, strict=False)
            )
        self.num_accepted += len(new) - 1
        row.token_ids += new
        row.sampled_in = max(self.in_flight)
        result.token_ids[entry.request_id] = tuple(new)
        if self.num_drafts and row.sampling.beam_width == 1:
            row.draft_tokens = self._draft(row)
            result.draft_token_ids[entry.request_id] = tuple(row.draft_tokens)
        return new

    def _draft(self, row: Row) -> list[int]:
        first = len(row.token_ids) - row.num_prompt
        output = row.truth.output if row.truth is not None else ()
        draft_tokens = []
        for i in range(first, first + self.rng.randint(0, self.num_drafts)):
            right = i < len(output) and self.rng.random() < 0.7
            draft_tokens.append(output[i] if right else self.rng.randrange(VOCAB))
        return draft_tokens
