"""A rank that comes to grief: `python -m tests.distributed.bad_worker PHASE ACT` and the rank's own
arguments. PHASE is hello, load or step, ACT is kill, stop or raise."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from ridgeline import worker

STEPS = 3  # go well


def come_to_grief(act: str) -> None:
    if act == "raise":
        raise RuntimeError("broken on purpose")
    os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)


def main() -> int:
    phase, act = sys.argv[1:3]
    del sys.argv[1:3]
    if phase == "hello":
        come_to_grief(act)
    build = worker._build

    def spoilt(*args: Any) -> Any:
        if phase == "load":
            come_to_grief(act)
        rank = build(*args)
        run, left = rank.executor._run, [STEPS]

        def step(plan: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                come_to_grief(act)
            return run(plan)

        rank.executor._run = step  # type: ignore[method-assign]
        return rank

    worker._build = spoilt  # type: ignore[assignment]
    return worker.main()


if __name__ == "__main__":
    os._exit(main())
