"""How much code does one chat request run through? Files, functions, their lines, changes of file.

Run from the checkout: python -m tools.trace_request [off]. The bundled model answers with its draft
model, with `off` without it. A first request warms everything up, and steps of one row are captured
with each number of drafts; the second request (streamed, 8 tokens) is traced in every thread of
this process. Lines are those of the functions that ran, without blank
lines and comments.
"""

from __future__ import annotations

import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import ridgeline
from ridgeline import LLM, SamplingParams, demo
from ridgeline.executor.decode_graphs import Sampling
from ridgeline.executor.local import LocalExecutor

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


def main() -> int:
    llm = LLM(demo.DEFAULT, speculate=sys.argv[1] if len(sys.argv) > 1 else "auto")
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
