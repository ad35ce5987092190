"""Which tokens may each row of this step get, where an answer must keep to a grammar?

The host keeps a matcher for each such row. While the device computes a step, a thread feeds the
matchers the tokens of the steps before and has them fill their masks, a bit for each token, which
reach the device before the step is sampled. Of several ranks that sample, the first has the
matchers and sends its masks to the others. Letters: R rows that sample, Q places of a row (its
newest token and its drafts), V vocabulary, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ridgeline.distributed.placement import Collective
from ridgeline.errors import InternalError
from ridgeline.executor.future import Pending
from ridgeline.executor.transfer import Array, Transfer
from ridgeline.sampling.grammar import MOST_LETTERS, GrammarCompiler
from ridgeline.step import NewRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher

BITS = 32
EVERY = -1  # a word of a row that may get any token


@dataclass(slots=True, eq=False)
class _Matched:
    """One row, and its tokens that the matcher has not consumed."""

    matcher: LLMatcher
    is_over: bool = False  # an end token came: the host ends the row
    token_ids: list[int] = field(default_factory=list)


class GrammarMasks:
    """`make_compiler` is there once the vocabulary is known; `rank` 0 needs it, and alone has
    `rows`, by request."""

    def __init__(
        self, vocab_size: int, transfer: Transfer, ranks: Collective | None = None, rank: int = 0
    ) -> None:
        self.make_compiler: Callable[[], GrammarCompiler] | None = None
        self._compiler: GrammarCompiler | None = None
        self._vocab_size, self._transfer = vocab_size, transfer
        self._ranks, self._rank = ranks, rank
        self._num_words = -(-vocab_size // BITS)
        self.rows: dict[str, _Matched] = {}
        self._problems: dict[str, str] = {}  # of rows whose matchers have failed
        self._unread: list[tuple[Pending, dict[str, _Matched]]] = []
        self._thread: ThreadPoolExecutor | None = None
        self._begun: Future[tuple[Array, Array | None]] | None = None
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def compiler(self) -> GrammarCompiler:
        """Made when it is first asked for. RequestFault where there can be none."""
        if self._compiler is None:
            if self.make_compiler is None:
                raise InternalError("a grammar without a vocabulary")
            self._compiler = self.make_compiler()
        return self._compiler

    def open(self, new: NewRequest) -> None:
        """A row whose answer keeps to a grammar; what it has of it counts. Its constraint was
        compiled before, where that could be stopped."""
        if not self._rank:
            matcher = self.compiler.compile(new.sampling.constraint)
            known = list(new.token_ids[new.num_prompt_tokens :])
            self.rows[new.request_id] = _Matched(matcher, token_ids=known)

    def close(self, request_id: str) -> None:
        self.rows.pop(request_id, None)
        self._problems.pop(request_id, None)

    def follow(self, names: Sequence[str], pending: Pending) -> None:
        """This step was sent; its tokens will be read when the next masks are made."""
        mine = {name: row for name in names if (row := self.rows.get(name)) is not None}
        if mine:
            self._unread.append((pending, mine))
            pending.reasons = self._problems

    def begin(self, names: Sequence[str]) -> None:
        """Make the masks of these rows, which the step will sample, while the device computes."""
        if self.rows.keys().isdisjoint(names):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        self._begun = self._thread.submit(self._masks, tuple(names))

    def allowed(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """[R, V] (bool): the tokens that the rows of `begin` may get. Waits for it."""
        words_RW, bits_RV = self._made(num_rows)
        return self._spread(words_RW, device) if bits_RV is None else torch.from_numpy(bits_RV)

    def allowed_run(
        self, names: Sequence[str], drafts_Rk: Array, limits: Sequence[int], device: torch.device
    ) -> torch.Tensor:
        """[R * Q, V]: the same for each place of a run, if the drafts before it are right. Behind
        a draft that the grammar refuses nothing is looked at: nobody gets there."""
        num, k = drafts_Rk.shape
        words_RQW = np.full((num, k + 1, self._num_words), EVERY, np.int32)
        words_RQW[:, 0] = self._made(num)[0]
        for place, name in enumerate(names):
            row, drafts = self.rows.get(name), drafts_Rk[place, : limits[place]].tolist()
            if row is not None and drafts and not row.is_over:
                _look_ahead(row.matcher, drafts, words_RQW[place, 1:])
        return self._spread(words_RQW.reshape(num * (k + 1), -1), device)

    def _made(self, num_rows: int) -> tuple[Array, Array | None]:
        begun, self._begun = self._begun, None
        if begun is None:  # of another rank
            return np.full((num_rows, self._num_words), EVERY, np.int32), None
        return begun.result()

    def _masks(self, names: Sequence[str]) -> tuple[Array, Array | None]:
        """Words of each row and, where they are used on this host alone, their bits. On the
        thread: what was sent off is over when it is read, or is waited for."""
        unread, self._unread = self._unread, []
        for pending, followed in unread:
            token_ids = pending.token_ids_now()
            for name, row in followed.items():
                row.token_ids += token_ids.get(name, ())
        words_RW = np.full((len(names), self._num_words), EVERY, np.int32)
        for place, name in enumerate(names):
            if (mine := self.rows.get(name)) is None:
                continue
            _consume(mine)
            if not mine.is_over:
                _fill(mine.matcher, words_RW[place])
                if mine.matcher.is_error():
                    problem = mine.matcher.get_error()[:MOST_LETTERS]
                    self._problems[name] = f"its grammar failed: {problem}"
        bits_RV = None
        if self._ranks is None and type(self._transfer) is Transfer:
            bits_RV = _bits(words_RW, self._vocab_size)
        return words_RW, bits_RV

    def _spread(self, words_RW: Array, device: torch.device) -> torch.Tensor:
        """Bits to [R, V] (bool), on the device; on all ranks those of the first."""
        there_RW = self._transfer.send(words_RW)
        if self._ranks is not None:
            there_RW = self._ranks.broadcast(there_RW, 0)
        if device.type == "cpu":
            return torch.from_numpy(_bits(there_RW.numpy(), self._vocab_size))
        if device not in self._places:
            ids_V = torch.arange(self._vocab_size, device=device)
            self._places[device] = ids_V // BITS, (ids_V % BITS).int()
        words_V, bits_V = self._places[device]
        return (there_RW[:, words_V] >> bits_V).bitwise_and_(1).bool()


def _bits(words_RW: Array, vocab_size: int) -> Array:
    bits = np.unpackbits(words_RW.view(np.uint8), axis=1, bitorder="little")
    return bits[:, :vocab_size].view(np.bool_)


def _consume(row: _Matched) -> None:
    token_ids, row.token_ids = row.token_ids, []
    for token_id in token_ids:
        if row.is_over or not row.matcher.consume_token(token_id):
            return
        row.is_over = row.matcher.stop_reason() == "EndOfSentence"


def _fill(matcher: LLMatcher, words_W: Array) -> None:
    matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
    if matcher.is_error():
        words_W.fill(0)  # no token at all: the row is at fault, and says so


def _look_ahead(matcher: LLMatcher, drafts: list[int], words_kW: Array) -> None:
    num_taken = 0
    for place, token_id in enumerate(drafts):
        if matcher.try_consume_tokens([token_id]) == 0:
            break
        num_taken += 1
        if matcher.stop_reason() == "EndOfSentence":
            break
        _fill(matcher, words_kW[place])
    if num_taken:
        matcher.rollback(num_taken)
