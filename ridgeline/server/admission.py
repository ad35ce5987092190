"""Is there room for one more request? What each one costs is reserved before the work is done.

Everything runs on one event loop and no method waits, so checking and counting are one step. Each
reservation belongs to a Ticket, and leaving its `with` block gives all of it back.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType

from ridgeline.server.auth import Tenant
from ridgeline.server.config import Limits
from ridgeline.server.errors import ApiError

OVERLOADED = "the server has as much work as it may hold ({what}); try again later"


class Ticket:
    """One request's share of what the server may hold."""

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self._admission = admission
        self._tenant = tenant
        self._bytes = self._sequences = self._tokens = 0
        self._open = True

    def hold_bytes(self, count: int) -> None:
        """Hold `count` more bytes of body, or of what is read from it. Raises ApiError overloaded,
        or request_too_large for a body that would not fit into an empty server."""
        held = self._admission
        if (needed := self._bytes + count) > held.limits.max_held_body_bytes:
            raise ApiError(
                "request_too_large",
                f"this body takes {needed} bytes of memory, and all bodies together may take "
                f"{held.limits.max_held_body_bytes}; send it in several requests",
            )
        if held.num_bytes + count > held.limits.max_held_body_bytes:
            raise ApiError("overloaded", OVERLOADED.format(what="bytes of bodies"))
        held.num_bytes += count
        self._bytes += count

    def reserve(self, num_sequences: int, num_prompt_tokens: int) -> None:
        """Before the engine hears of it. Raises ApiError overloaded, or limit_exceeded for a
        request that would not fit into an empty server."""
        held = self._admission
        if num_sequences > held.max_sequences or num_prompt_tokens > held.max_tokens:
            raise ApiError(
                "limit_exceeded",
                f"the prompts of one request may make {held.max_sequences} sequences and "
                f"{held.max_tokens} tokens; send them in several requests",
                "prompt",
            )
        if held.num_sequences + num_sequences > held.max_sequences:
            raise ApiError("overloaded", OVERLOADED.format(what="requests"))
        if held.num_tokens + num_prompt_tokens > held.max_tokens:
            raise ApiError("overloaded", OVERLOADED.format(what="prompt tokens"))
        held.num_sequences += num_sequences
        held.num_tokens += num_prompt_tokens
        self._sequences += num_sequences
        self._tokens += num_prompt_tokens

    def release(self) -> None:
        """Give everything back; again is harmless."""
        if not self._open:
            return
        self._open = False
        held = self._admission
        held.num_requests -= 1
        held.num_bytes -= self._bytes
        held.num_sequences -= self._sequences
        held.num_tokens -= self._tokens
        held.give_back(self._tenant)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Admission:
    """What all open requests hold together, and the ceilings."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.num_requests = self.num_bytes = self.num_sequences = self.num_tokens = 0
        self.max_sequences = limits.max_queued_sequences
        self.max_tokens = 0
        self._by_key: Counter[bytes] = Counter()

    def size(self, *, max_num_seqs: int, cache_tokens: int) -> None:
        """Set the ceilings that depend on the engine: how many sequences it runs at once, and
        how many tokens its cache holds."""
        self.max_sequences = max_num_seqs + self.limits.max_queued_sequences
        self.max_tokens = int(cache_tokens * self.limits.max_queued_cache_fills)

    def open(self, tenant: Tenant) -> Ticket:
        """A ticket for a request of this tenant. Raises ApiError rate_limit_exceeded."""
        key = tenant.key
        if key and self._by_key[key] >= self.limits.max_requests_per_key:
            raise ApiError(
                "rate_limit_exceeded",
                f"this key has {self.limits.max_requests_per_key} requests open, its limit",
            )
        ceiling = 2 * self.max_sequences
        if self.num_requests >= ceiling:  # bodies not yet read count too
            raise ApiError("overloaded", OVERLOADED.format(what="requests"))
        self.num_requests += 1
        self._by_key[key] += 1
        return Ticket(self, tenant)

    def give_back(self, tenant: Tenant) -> None:
        key = tenant.key
        self._by_key[key] -= 1
        if not self._by_key[key]:
            del self._by_key[key]
