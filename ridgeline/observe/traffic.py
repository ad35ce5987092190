"""What came in and what went out? Counters of requests, sequences and tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """All counts only rise. `finished` is by finish reason, `refused` by error code.

    Both have few keys by construction: reasons and codes are ours, never the client's words.
    """

    num_requests: int = 0
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_late_outputs: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def accepted(self, num_sequences: int, num_prompt_tokens: int) -> None:
        self.num_requests += 1
        self.num_sequences += num_sequences
        self.num_prompt_tokens += num_prompt_tokens
