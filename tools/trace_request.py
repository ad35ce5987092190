"""How much code does one chat request run through? Files, functions, their lines, changes of file.

Run from the checkout: python -m tools.trace_request [off | walks]. The bundled model answers with
its draft model, with `off` without it; `walks` follows two other things instead: who is given
`--kv-cache-dtype int8` or what it became, and who is given one weight by name. A first request
warms everything up, and steps of one row are captured with each number of drafts; the second
request (streamed, 8 tokens) is traced in every thread of this process. To the choice of how many
to draft each step seems to take its price: otherwise another program on the machine changes the
way. Lines are those of the functions that ran, without blank lines and comments.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ridgeline
from ridgeline import LLM, SamplingParams, demo
from ridgeline.executor.decode_graphs import Sampling
from ridgeline.executor.local import LocalExecutor
from ridgeline.speculation.controller import DraftLengthController
from ridgeline.step import PricedStep

PACKAGE = str(Path(ridgeline.__file__).parent)
QUESTION = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]


class Trace:
    """The package's functions in the order in which they were entered."""

    def __init__(self) -> None:
        self.entered: list[CodeType] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.entered.append(frame.f_code)

    def summary(self) -> str:
        codes = {code for code in self.entered if not code.co_name.startswith("<")}
        files = {code.co_filename for code in codes}
        lines = {(code.co_filename, line) for code in codes for *_, line in code.co_lines() if line}
        changes = sum(a.co_filename != b.co_filename for a, b in pairwise(self.entered))
        return (
            f"{len(files)} files, {len(codes)} functions of {len(lines)} lines of code; "
            f"{len(self.entered)} calls, {changes} changes of file"
        )


def ask(llm: LLM) -> str:
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    return "".join(piece.text for piece in llm.chat_stream(QUESTION, sampling))


def take_prices_for_times(llm: LLM) -> None:
    controller = llm.engine.scheduler.draft_lengths
    if isinstance(controller, DraftLengthController):
        learn = controller.times.on_priced

        def learn_price(step: PricedStep) -> None:
            learn(replace(step, ended=step.began + step.price.expected_s, host_s=0.0))

        controller.times.__dict__["on_priced"] = learn_price


WEIGHT = "model.layers.2.mlp.down_proj.weight"


def is_int8_cache(value: object) -> bool:
    names = (value, getattr(value, "kv_cache_dtype", None), getattr(value, "name", None))
    form = getattr(value, "format", None)
    return any(isinstance(n, str) and n == "int8" for n in (*names, getattr(form, "name", None)))


def is_weight(value: object) -> bool:
    return value == WEIGHT if isinstance(value, str) else getattr(value, "name", None) == WEIGHT


def walk(is_it: Callable[[object], bool], **options: Any) -> str:
    """Files and functions that are given what `is_it` knows while a model is loaded and answers."""
    found: set[CodeType] = set()

    def follow(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(is_it(frame.f_locals.get(name)) for name in given):
                found.add(code)

    threading.setprofile(follow)
    sys.setprofile(follow)
    with LLM(demo.DEFAULT, speculate="off", **options) as llm:
        ask(llm)
    sys.setprofile(None)
    threading.setprofile(None)
    return f"{len({code.co_filename for code in found})} files, {len(found)} functions"


def main() -> int:
    if sys.argv[1:] == ["walks"]:
        print("kv_cache_dtype int8:", walk(is_int8_cache, kv_cache_dtype="int8", dtype="float32"))
        print("one weight:", walk(is_weight))
        return 0
    llm = LLM(demo.DEFAULT, speculate=sys.argv[1] if len(sys.argv) > 1 else "auto")
    take_prices_for_times(llm)
    ask(llm)
    executor = llm.engine.executor
    if isinstance(executor, LocalExecutor) and (drafter := executor.drafter) is not None:
        for num_draft_tokens in range(drafter.method.max_draft_tokens + 1):
            drafter.graphs.prepare(1, num_draft_tokens, Sampling.GREEDY)
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    text = ask(llm)
    sys.setprofile(None)
    threading.setprofile(None)
    print(repr(text))
    print(trace.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
