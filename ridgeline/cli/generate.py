"""`ridgeline generate`: what does the model say to these prompts?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.answer_stats import AnswerStats, add_stats_flag
from ridgeline.cli.flags import add_sampling_flags, sampling_changes
from ridgeline.cli.parser import Parser
from ridgeline.cli.session import CtrlC, add_session_flags, note, open_llm
from ridgeline.cli.tables import plain
from ridgeline.cli.values import ids
from ridgeline.errors import ConfigError
from ridgeline.startup import total_s

if TYPE_CHECKING:
    from ridgeline.llm import LLM, GenerationResult
    from ridgeline.request import SamplingParams, TokenLogprobs

DEFAULT_MAX_TOKENS = 256
EXAMPLES = f"""The text goes to standard output as it comes, with one newline at its end; everything
else goes to standard error. Without --max-tokens an answer has at most {DEFAULT_MAX_TOKENS} tokens.

examples:
  ridgeline generate -p "Once upon a time"                         by the bundled model
  ridgeline generate path/to/model -p "Once upon a time" --temperature 0
  ridgeline generate path/to/model -p "One" -p "Two" -p "Three"    three prompts in one batch
  cat letter.txt | ridgeline generate path/to/model -p -           the prompt from standard input
  ridgeline generate path/to/model -p "Why?" --n 4 --seed 7 --json
  ridgeline generate path/to/model -p - --speculate draft:path/to/small    drafts by a small model
  ridgeline generate examples/tiny-random --load-format random --token-ids 1,2,3
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a text, or token ids as they are."""

    text: str | None
    token_ids: tuple[int, ...]


def add_arguments(parser: Parser) -> None:
    flag = parser.flags("prompts (at least one)")
    flag("-p --prompt TEXT", "- reads standard input", default=[], action="append")
    flag("--prompt-file FILE", "a whole file, UTF-8", default=[], action="append")
    flag("--token-ids IDS", "such as 1,2,3", ids, default=[], action="append")
    parser.flag("--json", "print everything known as JSON")
    add_stats_flag(parser)
    add_session_flags(parser, without=("seed",))
    add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    texts = read_prompts(args)
    changes = sampling_changes(args)
    seed = {"seed": changes["seed"]} if "seed" in changes else {}
    with open_llm(args, **seed) as llm:
        prompts = [_encode(llm, text) for text in texts]
        sampling = [answer_sampling(llm, changes, len(prompt.token_ids)) for prompt in prompts]
        if len(prompts) == 1 and _streams(args, sampling[0]):
            return _stream(args, llm, prompts[0], sampling[0])
        return _batch(args, llm, prompts, sampling)


def read_prompts(args: argparse.Namespace) -> list[str | tuple[int, ...]]:
    """The prompts in the order of their kinds. ConfigError when there is none."""
    texts: list[str | tuple[int, ...]] = [
        sys.stdin.read() if text == "-" else text for text in args.prompt
    ]
    texts += [_read(name) for name in args.prompt_file]
    texts += args.token_ids
    if not texts:
        raise ConfigError("no prompt was given; use -p TEXT, -p - (standard input) or --token-ids")
    return texts


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {name}: {error}") from None


def _encode(llm: LLM, prompt: str | tuple[int, ...]) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(prompt, tuple(llm.encode(prompt)))
    return Prompt(None, prompt)


def answer_sampling(llm: LLM, changes: dict[str, Any], num_prompt_tokens: int) -> SamplingParams:
    """The flags over the model's defaults; an unasked max_tokens fits what the context leaves."""
    room = llm.resolved.max_model_len - num_prompt_tokens
    least = max(1, changes.get("min_tokens", 0))
    default = max(least, min(DEFAULT_MAX_TOKENS, room))
    return llm.sampling(**({"max_tokens": default} | changes))


def _streams(args: argparse.Namespace, sampling: SamplingParams) -> bool:
    plain = sampling.n == 1 and sampling.best_of is None and sampling.beam_width == 1
    return plain and not args.json and sampling.logprobs is None


def _stream(args: argparse.Namespace, llm: LLM, prompt: Prompt, sampling: SamplingParams) -> int:
    """One answer, written as it comes. Ctrl-C ends it between two tokens."""
    stats = AnswerStats(args, llm)
    with CtrlC() as ctrl_c:
        for piece in ctrl_c.watch(llm.stream(prompt.token_ids, sampling)):
            stats.take(piece)
            sys.stdout.write(piece.text if llm.tokenizer else _ids_text(piece.token_ids, " "))
            sys.stdout.flush()
    sys.stdout.write("\n")
    stats.show()
    if ctrl_c.pressed:
        raise KeyboardInterrupt
    return 0


def _ids_text(token_ids: tuple[int, ...], end: str = "") -> str:
    """What stands for the text of a model without a tokenizer."""
    return " ".join(map(str, token_ids)) + (end if token_ids else "")


def _batch(
    args: argparse.Namespace, llm: LLM, prompts: list[Prompt], sampling: list[SamplingParams]
) -> int:
    """All answers in one batch, in the order of the prompts."""
    stats = AnswerStats(args, llm)
    results = llm.generate(
        [prompt.token_ids for prompt in prompts], sampling, progress=False if args.quiet else None
    )
    if args.json:
        print(json.dumps(as_json(llm, prompts, results), indent=2, ensure_ascii=False))
    else:
        for number, result in enumerate(results):
            _print_result(args, llm, result, f"prompt {number}" if len(results) > 1 else "")
    stats.show_batch(results)
    return 0


def _print_result(args: argparse.Namespace, llm: LLM, result: GenerationResult, title: str) -> None:
    for choice in result.outputs:
        named = [title] if title else []
        named += [f"answer {choice.index}"] if len(result.outputs) > 1 else []
        if named:
            note(args, f"--- {', '.join(named)}")
        print(choice.text if llm.tokenizer else _ids_text(choice.token_ids), flush=True)
        if choice.logprobs is not None:
            _print_logprobs(llm, choice.logprobs)


def _print_logprobs(llm: LLM, logprobs: tuple[TokenLogprobs, ...]) -> None:
    for entry in logprobs:
        others = "  ".join(f"{_piece(llm, i)} {value:.3f}" for i, value in entry.top)
        chosen = f"{_piece(llm, entry.token_id):<16} {entry.logprob:8.4f}  rank {entry.rank:<5}"
        print(f"{chosen} {others}".rstrip(), file=sys.stderr)


def _piece(llm: LLM, token_id: int) -> str:
    return repr(llm.tokenizer.decode([token_id])) if llm.tokenizer else str(token_id)


def as_json(llm: LLM, prompts: list[Prompt], results: list[GenerationResult]) -> dict[str, Any]:
    """Everything known about the answers, as plain JSON values."""
    start = llm.built.startup
    return {
        "model": llm.resolved.model_name,
        "start": {"total_s": total_s(start), "phases": [asdict(phase) for phase in start]},
        "results": [_result_json(p.text, r) for p, r in zip(prompts, results, strict=True)],
    }


METRICS = "ttft_s tpot_s e2e_s num_cached_tokens num_preemptions"
CHOICE = "index text token_ids finish_reason stop_reason cumulative_logprob"


def _result_json(text: str | None, result: GenerationResult) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt": text,
        "prompt_token_ids": list(result.prompt_token_ids),
        "outputs": [
            plain(choice, CHOICE) | _logprobs_json("logprobs", choice.logprobs)
            for choice in result.outputs
        ],
        "metrics": plain(result.metrics, METRICS),
    }
    return record | _logprobs_json("prompt_logprobs", result.prompt_logprobs)


def _logprobs_json(key: str, entries: Sequence[TokenLogprobs | None] | None) -> dict[str, Any]:
    """Under `key`, where they were asked for."""
    return {} if entries is None else {key: [one and _logprob_json(one) for one in entries]}


def _logprob_json(one: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": value} for token_id, value in one.top]
    return {**plain(one, "token_id logprob rank"), "top": top}
