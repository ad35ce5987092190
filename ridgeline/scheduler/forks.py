"""Which requests wait for another one's prompt?"""

from __future__ import annotations

from ridgeline.request import Request


def can_share(child: Request, parent: Request) -> bool:
    """Is there a computed prompt that `child` could take over from `parent`?"""
    return (
        not parent.is_ended
        and len(child.prompt_token_ids) > 1
        and child.prompt_token_ids == parent.prompt_token_ids
        and child.cache_salt == parent.cache_salt
        and child.sampling.prompt_logprobs is None
    )


def has_prompt(parent: Request, num_computed: int) -> bool:
    """Are all prompt tokens but the last, which each fork computes itself, among them?"""
    return num_computed >= len(parent.prompt_token_ids) - 1


class Forks:
    """Forks that have not been admitted yet. They are parked, out of everybody's way, while their
    parent lives and its prompt is not computed; then they wait in line like all others."""

    def __init__(self) -> None:
        self._parents: dict[str, Request] = {}  # by fork
        self.parked: dict[str, dict[str, Request]] = {}  # by parent, by fork
        self._woken: dict[str, None] = {}  # parents whose forks may wait in line from now on

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def num_parked(self) -> int:
        return sum(len(forks) for forks in self.parked.values())

    @property
    def is_quiet(self) -> bool:
        """Nobody is parked and nobody is about to wait in line."""
        return not self.parked and not self._woken

    def add(self, fork: Request, parent: Request) -> None:
        self._parents[fork.request_id] = parent

    def park(self, fork: Request) -> None:
        parent = self._parents[fork.request_id].request_id
        self.parked.setdefault(parent, {})[fork.request_id] = fork

    def parent_of(self, fork: Request) -> Request | None:
        """The parent of a fork that has not been admitted, while it lives."""
        parent = self._parents.get(fork.request_id)
        return None if parent is None or parent.is_ended else parent

    def is_parked(self, fork: Request) -> bool:
        parent = self._parents.get(fork.request_id)
        if parent is None:
            return False
        return self.parked.get(parent.request_id, {}).get(fork.request_id) is fork

    def wake(self, parent: Request) -> None:
        """The parent has its prompt, or is gone: nothing to wait for any more."""
        if parent.request_id in self.parked:
            self._woken[parent.request_id] = None

    def take_woken(self) -> list[Request]:
        if not self._woken:
            return []
        forks = [f for p in self._woken for f in self.parked.pop(p, {}).values()]
        self._woken.clear()
        return forks

    def discard(self, fork: Request) -> None:
        """It was admitted or has ended; safe for one that is no fork."""
        if (parent := self._parents.pop(fork.request_id, None)) is None:
            return
        siblings = self.parked.get(parent.request_id, {})
        siblings.pop(fork.request_id, None)
        if not siblings:
            self.parked.pop(parent.request_id, None)
