"""Where did a row's last tokens stand before, and what followed them there?

Letters: B rows of the step, N rows there is room for, L tokens of the longest, E ends of matches,
P partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.errors import check
from ridgeline.kernels.cpu.native import library
from ridgeline.kernels.drafts import History

MOST_SPLITS = 64  # of a row that is looked through by a GPU, at most


@dataclass(frozen=True, slots=True)
class LookupRule:
    """What comes next is what came next before: the row's last tokens, at least `min_match` and
    counted up to `max_match`, are looked for in the tokens before them."""

    min_match: int
    max_match: int
    max_draft_tokens: int
    drafts_per_match: int = 0  # so many for each token that matches; 0: always `max_draft_tokens`


@dataclass(frozen=True, slots=True)
class LookupBuffers:
    """Scratch of one stream, of a GPU: `best_P` (int64) may hold anything, `arrivals_B` (int32) is
    zero before and after every launch."""

    best_P: torch.Tensor
    arrivals_B: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.best_P.nbytes + self.arrivals_B.nbytes


def make_lookup_buffers(device: torch.device, max_rows: int) -> LookupBuffers:
    """For up to `max_rows` rows of a launch; on a CPU there is nothing in it."""
    rows = max_rows if device.type == "cuda" else 0
    return LookupBuffers(
        torch.empty(rows * MOST_SPLITS, dtype=torch.int64, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )


def lookup(rows_B: torch.Tensor, history: History, rule: LookupRule, room: LookupBuffers) -> None:
    """Leave behind each row's tokens what followed when its last tokens stood there before.

    The longest match counts, of equally long ones the most recent. Drafts that go beyond the
    row's tokens repeat them with the period that the match shows. Without a match none is found.
    """
    check(0 < rule.min_match <= rule.max_match, "1 <= min_match <= max_match", rule=rule)
    check(rule.max_draft_tokens > 0 and rule.drafts_per_match >= 0, "drafts are made", rule=rule)
    if rows_B.is_cuda:
        from ridgeline.kernels.prompt_lookup_triton import lookup_triton

        # Prompts that end in one step may be more rows than a captured step has.
        for some_B in torch.split(rows_B, len(room.arrivals_B)):
            lookup_triton(some_B, history, rule, room)
    elif rows_B.device.type == "cpu" and library() is not None:
        from ridgeline.kernels.cpu.drafts import lookup as native_lookup

        native_lookup(rows_B, history, rule)
    else:
        lookup_reference(rows_B, history, rule)


def lookup_reference(rows_B: torch.Tensor, history: History, rule: LookupRule) -> None:
    width = history.tokens_NL.shape[1]
    for row in rows_B.tolist():
        if row == 0:
            continue
        num = int(history.lens_N[row])
        end, match = _longest_match(history.tokens_NL[row, :num], rule.max_match)
        wanted = rule.drafts_per_match * match or rule.max_draft_tokens
        found = min(wanted, rule.max_draft_tokens, width - num) if match >= rule.min_match else 0
        history.found_N[row] = found
        if found:
            steps = torch.arange(found, device=rows_B.device) % (num - end)
            history.tokens_NL[row, num : num + found] = history.tokens_NL[row, end + steps]


def _longest_match(tokens_L: torch.Tensor, max_match: int) -> tuple[int, int]:
    """Where the tokens end that are those at the end, and how many they are; (0, 0) if none."""
    num = len(tokens_L)
    if num < 2:
        return 0, 0
    lengths_E = torch.zeros(num - 1, dtype=torch.int64, device=tokens_L.device)  # ends 1 .. num-1
    goes_on_E = torch.ones_like(lengths_E, dtype=torch.bool)
    for back in range(min(max_match, num - 1)):
        goes_on_E[:back] = False
        goes_on_E[back:] &= tokens_L[: num - 1 - back] == tokens_L[num - 1 - back]
        lengths_E += goes_on_E
    longest = int(lengths_E.max())
    end = int((lengths_E == longest).nonzero()[-1]) + 1
    return (end, longest) if longest else (0, 0)
