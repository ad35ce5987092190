"""How often does a draft model draft what its target says?

Both figures follow from one teacher-forced pass of the draft over the target's own greedy answers
(end token included): token i is a match when it is the draft's likeliest token after the prompt
and the target's tokens before i.

- `draft_agreement`: the share of the answers' tokens that match (n tokens; Wilson's interval, its
  trials divided by the design effect of tokens that come in answers).
- `accepted_length_k4`: tokens of the answers / verification steps of greedy speculative decoding
  with k = 4 drafted tokens (n steps; normal approximation, answers as units). A step begins where
  the last one ended, the draft drafts 4 tokens one after another, the target keeps those up to the
  first that is not its own and adds one of its own (the bonus token). The drafts of a step equal
  the teacher-forced ones up to and including the first mismatch, so counting matches is exact. A
  step gives 1 to 5 tokens, and the last step of an answer no more than the answer has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ridgeline.errors import ConfigError, EngineFault
from ridgeline.evaluation.answers import Answered, by_task
from ridgeline.evaluation.intervals import Row, clustered_share, ratio
from ridgeline.request import SamplingParams

if TYPE_CHECKING:
    from ridgeline.llm import LLM

NUM_DRAFTED = 4
RANKS = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
SAMPLES = 16  # answers whose text must become the same tokens in both models


def check_pair(target: LLM, draft: LLM, answered: Sequence[Answered]) -> None:
    """ConfigError when the two do not share their vocabulary, as far as can be seen."""
    same = target.spec.vocab_size == draft.spec.vocab_size
    for one in answered[:SAMPLES]:
        text = one.question.problem.messages[-1].content
        same = same and target.encode(text) == draft.encode(text)
    if not same:
        raise ConfigError(
            "the draft has another vocabulary than the model; a draft must share its tokenizer"
        )


def matches(
    draft: LLM, answered: Sequence[Answered], *, progress: bool | None
) -> list[tuple[bool, ...]]:
    """For each answer, which of its tokens the draft would have drafted. Answers whose tokens
    exceed the draft's context are cut there."""
    longest = draft.resolved.max_model_len - 1
    prompts = [(*a.question.prompt_token_ids, *a.token_ids)[:longest] for a in answered]
    if not prompts:
        return []
    results = draft.generate(prompts, RANKS, progress=progress)
    found = []
    for one, result in zip(answered, results, strict=True):
        if result.error is not None:
            raise EngineFault(result.error)
        ranks = result.prompt_logprobs or ()
        entries = ranks[len(one.question.prompt_token_ids) :]
        found.append(tuple(entry is not None and entry.rank == 1 for entry in entries))
    return found


def num_steps(matched: Sequence[bool], k: int = NUM_DRAFTED) -> int:
    """Verification steps of greedy speculative decoding until the answer is complete."""
    steps = position = 0
    while position < len(matched):
        steps += 1
        drafted = matched[position : position + k]
        accepted = drafted.index(False) if False in drafted else len(drafted)
        position += accepted + 1
    return steps


def agreement_rows(
    answered: Sequence[Answered], matched: Sequence[tuple[bool, ...]]
) -> Iterator[Row]:
    """Both figures for each task; a task whose answers are all empty has none."""
    found = dict(zip(map(id, answered), matched, strict=True))
    for task, group in by_task(answered).items():
        lines = [line for one in group if (line := found[id(one)])]
        if not lines:
            continue
        tokens, steps = [len(line) for line in lines], [num_steps(line) for line in lines]
        share, low, high = clustered_share([sum(line) for line in lines], tokens)
        yield Row(task, "draft_agreement", share, sum(tokens), low, high)
        yield _length_row(task, tokens, steps)


def _length_row(task: str, tokens: Sequence[int], steps: Sequence[int]) -> Row:
    length = ratio(tokens, steps)
    low, high = length.interval()
    if low is not None and high is not None:  # a step gives at least one token
        low, high = max(1.0, low), min(1.0 + NUM_DRAFTED, high)
    return Row(task, "accepted_length_k4", length.value, sum(steps), low, high)
