"""A model that says what it is told to: behind a message that begins with SAY, that message.

For flows which no small model carries, such as a call of a tool, behind the real server. It has the
tests' engine without weights, whose tokens are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from ridgeline.config import EngineConfig
from ridgeline.step import ScheduledRequest, StepResult
from tests.server import fake_build
from tests.server.fake_build import END, FakeBuilt, FakeExecutor, Row
from tools.clients.flows import SAY

MARK = SAY.encode()
MAX_MODEL_LEN = 8192


class ScriptedExecutor(FakeExecutor):
    def _sample(self, entry: ScheduledRequest, row: Row, result: StepResult) -> None:
        wanted = _wanted(row)
        if wanted is None:
            super()._sample(entry, row, result)
            return
        num_before = entry.start + entry.num_tokens
        token_id = (*wanted, END)[min(num_before - row.num_prompt_tokens, len(wanted))]
        row.token_ids[num_before:] = [token_id]
        result.token_ids[entry.request_id] = (token_id,)


def _wanted(row: Row) -> bytes | None:
    """What its last message asks it to say: up to the template's next special token."""
    prompt = row.token_ids[: row.num_prompt_tokens]
    spelled = bytes(i if i < 256 else 0 for i in prompt)
    at = spelled.rfind(MARK)
    said, _, behind = spelled[at + len(MARK) :].partition(b"\0")
    return None if at < 0 or behind.strip(b"\0") else said


def build(config: EngineConfig, progress: Callable[[str, int, int], None]) -> FakeBuilt:
    config = structs.replace(config, max_model_len=MAX_MODEL_LEN, num_blocks=2048)
    built = fake_build.build(config, progress)
    executor = built.engine.executor
    built.engine.executor = ScriptedExecutor(executor.num_blocks, executor.block_size)
    return replace(built)
