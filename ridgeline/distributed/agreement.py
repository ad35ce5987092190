"""Have all ranks the same tokens? Each makes a digest of what it has sampled, or been sent, and the
driver compares them every PERIOD steps.

Every rank samples for itself, so one that comes to other tokens, whatever the reason, goes on with
a cache that is not that of the others, and all answers drift without any step that fails.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

from ridgeline.step import StepResult

PERIOD = 64  # steps
DIGEST_BYTES = 8


class Digest:
    """Of all tokens that one rank has had; steps are added in their order."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)

    def add(self, step_id: int, result: StepResult) -> bytes | None:
        """The digest up to this step, if it is one to be compared."""
        rows = result.token_ids.values()
        numbers = array("q", (step_id, *map(len, rows), *chain.from_iterable(rows)))
        self._hash.update(numbers)
        return None if step_id % PERIOD else self._hash.digest()


class Agreement:
    """What ranks have said. `groups`: ranks with the same tokens; what others say is not heard."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._group_of = {rank: tuple(group) for group in groups for rank in group}
        self._said: dict[tuple[int, ...], dict[int, dict[int, bytes]]] = {}  # by group, by step

    def add(self, rank: int, step_id: int, digest: bytes) -> tuple[int, ...]:
        """Ranks with other tokens than most of their group have; all of it where no digest has a
        majority. Empty as long as they agree, or not all have said theirs of this step."""
        if (group := self._group_of.get(rank)) is None:
            return ()
        steps = self._said.setdefault(group, {})
        said = steps.setdefault(step_id, {})
        said[rank] = digest
        if len(said) < len(group):
            return ()
        del steps[step_id]
        (most, number), *others = Counter(said.values()).most_common()
        if not others:
            return ()
        if 2 * number <= len(group):
            return group
        return tuple(one for one in group if said[one] != most)
