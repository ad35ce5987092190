"""Does an offline answer say what became of the guesses that were checked for it?"""

from __future__ import annotations

from ridgeline import LLM, SamplingParams

PROMPT = "one two three four five six seven eight one two three four five six seven eight one two"


def ask(speculate: str) -> tuple[int, int, int, tuple[int, ...]]:
    llm = LLM(
        "demo:chat", dtype="float32", speculate=speculate, num_blocks=200, max_num_seqs=4,
        warm_up="off",
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    result = llm.generate([PROMPT], sampling, progress=False)[0]
    llm.close()
    seen = result.metrics
    told = seen.num_accepted_tokens, seen.num_rejected_tokens, seen.num_output_tokens
    return *told, tuple(result.token_ids)


def test_accepted_and_rejected_guesses_of_an_answer() -> None:
    plain, guessed = ask("off"), ask("draft:demo:draft:3")
    assert plain[:2] == (0, 0)
    accepted, rejected, num_tokens, _ = guessed
    assert 0 < accepted < num_tokens
    assert rejected > 0
    assert guessed[2:] == plain[2:]
