"""Is there room for one more request? What each one costs is reserved before the work is done.

Everything runs on one event loop and no method waits, so checking and counting are one step. Each
reservation belongs to a Ticket, and leaving its `with` block gives all of it back.

A request holds a place for each sequence, one before its body is read. Where there are several keys
none takes the last places: it may hold at most SHARE times what stays free. So alone it gets 8 of 9
places, of k that ask for all each gets 8 of 8k + 1, and whoever holds nothing still finds one of
8k + 1 free: with f free, one that asks for n <= 8 (f - n) is let in.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType

from ridgeline.server.auth import Tenant
from ridgeline.server.config import Limits
from ridgeline.server.errors import ApiError

SHARE = 8  # times what stays free, for one of several keys
OVERLOADED = "the server has as much work as it may hold ({what}); try again later"


class Ticket:
    """One request's share of what the server may hold."""

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self._admission = admission
        self._tenant = tenant
        self._bytes = self._sequences = self._tokens = 0
        self._places = 1
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
        """Before the engine hears of it. Raises ApiError overloaded, rate_limit_exceeded when it is
        more than its key may hold now, or limit_exceeded for a request that would not fit into an
        empty server, or is more than its key may ever hold."""
        held = self._admission
        if num_sequences > held.max_sequences or num_prompt_tokens > held.max_tokens:
            raise ApiError(
                "limit_exceeded",
                f"the prompts of one request may make {held.max_sequences} sequences and "
                f"{held.max_tokens} tokens; send them in several requests",
                "prompt",
            )
        held.check_key(self._tenant, num_sequences)
        if held.num_sequences + num_sequences > held.max_sequences:
            raise ApiError("overloaded", OVERLOADED.format(what="requests"))
        if held.num_tokens + num_prompt_tokens > held.max_tokens:
            raise ApiError("overloaded", OVERLOADED.format(what="prompt tokens"))
        if num_sequences > self._places:
            held.take(self._tenant, num_sequences - self._places)
            self._places = num_sequences
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
        held.give_back(self._tenant, self._places)

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
        self.num_keys = 0
        self._by_key: Counter[bytes] = Counter()  # places

    def size(self, *, max_num_seqs: int, cache_tokens: int) -> None:
        """Set the ceilings that depend on the engine: how many sequences it runs at once, and
        how many tokens its cache holds."""
        self.max_sequences = max_num_seqs + self.limits.max_queued_sequences
        self.max_tokens = int(cache_tokens * self.limits.max_queued_cache_fills)

    def open(self, tenant: Tenant) -> Ticket:
        """A ticket for a request of this tenant. Raises ApiError rate_limit_exceeded or
        overloaded."""
        if self.num_requests >= 2 * self.max_sequences:  # bodies not yet read count too
            raise ApiError("overloaded", OVERLOADED.format(what="requests"))
        self.take(tenant, 1)
        self.num_requests += 1
        return Ticket(self, tenant)

    def take(self, tenant: Tenant, count: int) -> None:
        """So many more places. Raises ApiError rate_limit_exceeded, or overloaded for one that
        holds none."""
        held, limit = self._by_key[tenant.key], self._most(count)
        if tenant.key and held + count > limit:
            if not held:
                raise ApiError("overloaded", OVERLOADED.format(what="sequences"))
            raise ApiError(
                "rate_limit_exceeded",
                f"this key holds {held} sequences (a request with n=8 counts as 8) and asks for "
                f"{count} more; it may hold {limit} now: wait for answers, or have the server's "
                "--max-sequences-per-key or --max-queued-sequences raised",
            )
        self._by_key[tenant.key] += count

    def check_key(self, tenant: Tenant, count: int) -> None:
        """Raises ApiError limit_exceeded for more places than this key gets in an empty server:
        waiting would not help."""
        most = self._limit(self.max_sequences - count)
        if tenant.key and count > most:
            raise ApiError(
                "limit_exceeded",
                f"this request makes {count} sequences (n=8 counts as 8) and a key may hold {most} "
                "at most: ask for fewer, or have the server's --max-sequences-per-key or "
                "--max-queued-sequences raised",
            )

    def _most(self, count: int) -> int:
        """Places that a key may hold when it has taken `count` more."""
        return self._limit(self.max_sequences - self._by_key.total() - count)

    def _limit(self, num_free: int) -> int:
        """Places that a key may hold when so many are free then."""
        most = max(0, SHARE * num_free) if self.num_keys > 1 else self.max_sequences
        return min(most, self.limits.max_sequences_per_key or most)

    def give_back(self, tenant: Tenant, count: int) -> None:
        self._by_key[tenant.key] -= count
        if not self._by_key[tenant.key]:
            del self._by_key[tenant.key]
