"""How is an engine in this process driven by a measurement, step by step?

Whoever measures (an engine-neutral workload file, say) hands over requests with `.prompt` (token
ids), `.max_tokens` and `.temperature`, and reads back the submit time, the end and one (time,
tokens) per engine step.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline import LLM, SamplingParams
from ridgeline.answer import Answer, check_prompt, resolve_sampling
from ridgeline.request import Request
from ridgeline.startup import keep_what_is_there


@dataclass
class RunResult:
    t_submit: float
    t_done: float
    out_tokens: int
    steps: list[tuple[float, int]] = field(default_factory=list)

    @property
    def wall(self) -> float:
        return self.t_done - self.t_submit


class RidgelineEngine:
    """An engine in this process, driven step by step."""

    def __init__(self, model: str, **options: Any) -> None:
        self.llm = LLM(model, **options)
        keep_what_is_there()  # as the commands do
        self._count = 0

    def run(self, requests: Sequence[Any]) -> RunResult:
        """Submit all requests now and step until the last one has ended. A failure leaves the
        engine without requests, so that the next workload can be tried."""
        start = time.monotonic()
        added: list[Request] = []
        try:
            for request in requests:
                added.append(self.request(request, start))
                self.llm.engine.add(added[-1])
            return self._steps(start)
        except BaseException:
            for request in added:
                self.llm.engine.abort(request.request_id)
            raise

    def request(self, asked: Any, start: float) -> Request:
        """For the engine, as submitted at `start`."""
        llm = self.llm
        ids = check_prompt(asked.prompt, llm.spec.vocab_size)
        sampling = resolve_sampling(
            SamplingParams(
                max_tokens=asked.max_tokens, temperature=asked.temperature, ignore_eos=True
            ),
            len(ids),
            max_model_len=llm.resolved.max_model_len,
            vocab_size=llm.spec.vocab_size,
            end_token_ids=(),
        )
        self._count += 1
        answer = Answer(
            f"b{self._count}",
            ids,
            sampling,
            tokenizer=None,
            end_token_ids=frozenset(),
            arrival_time=start,
        )
        return answer.requests[0]

    def _steps(self, start: float) -> RunResult:
        engine = self.llm.engine
        steps: list[tuple[float, int]] = []
        total = 0
        while not engine.is_idle:
            tokens = sum(len(output.new_token_ids) for output in engine.step())
            if tokens:
                steps.append((time.monotonic(), tokens))
                total += tokens
        return RunResult(start, time.monotonic(), total, steps)

    def reset_prefix_cache(self) -> None:
        self.llm.engine.scheduler.blocks.clear_cache()

    def close(self) -> None:
        self.llm.close()
        gc.unfreeze()  # or what is kept would be kept for good
