"""Are reservations atomic, bounded and given back?"""

from __future__ import annotations

import random

import pytest

from ridgeline.server.admission import Admission, Ticket
from ridgeline.server.auth import Tenant
from ridgeline.server.config import Limits
from ridgeline.server.errors import ApiError


def admission(**limits: int) -> Admission:
    made = Admission(Limits(**limits))
    made.size(max_num_seqs=2, cache_tokens=100)
    return made


def code(caught: pytest.ExceptionInfo[ApiError]) -> str:
    return caught.value.code


def test_sequences_tokens_and_bytes_are_capped() -> None:
    held = admission(max_queued_sequences=3, max_held_body_bytes=10)
    with held.open(Tenant(b"")) as one, held.open(Tenant(b"")) as two:
        one.reserve(4, 399)
        with pytest.raises(ApiError) as caught:
            two.reserve(2, 1)
        assert code(caught) == "overloaded"
        with pytest.raises(ApiError) as caught:
            two.reserve(1, 2)
        assert code(caught) == "overloaded"
        assert (held.num_sequences, held.num_tokens) == (4, 399)  # a refusal takes nothing
        two.reserve(1, 1)
        one.hold_bytes(10)
        with pytest.raises(ApiError) as caught:
            two.hold_bytes(1)
        assert code(caught) == "overloaded"
        with pytest.raises(ApiError) as caught:
            two.hold_bytes(11)
        assert code(caught) == "request_too_large"
    assert (held.num_requests, held.num_bytes, held.num_sequences, held.num_tokens) == (0, 0, 0, 0)


def test_what_never_fits_is_the_requests_fault() -> None:
    held = admission(max_queued_sequences=3)
    with held.open(Tenant(b"")) as ticket:
        for cost in ((6, 1), (1, 401)):
            with pytest.raises(ApiError) as caught:
                ticket.reserve(*cost)
            assert (code(caught), caught.value.status) == ("limit_exceeded", 400)


def test_each_key_has_its_own_limit() -> None:
    held = admission(max_sequences_per_key=2)
    tickets = [held.open(Tenant(b"a")), held.open(Tenant(b"a")), held.open(Tenant(b"b"))]
    with pytest.raises(ApiError) as caught:
        held.open(Tenant(b"a"))
    assert code(caught) == "rate_limit_exceeded"
    assert (b"retry-after", b"1") in caught.value.headers
    tickets[0].release()
    tickets[0].release()  # twice is once
    tickets.append(held.open(Tenant(b"a")))
    for ticket in tickets:
        ticket.release()
    assert held.num_requests == 0


def test_without_keys_there_is_no_limit_per_key() -> None:
    held = admission(max_sequences_per_key=1, max_queued_sequences=10)
    tickets = [held.open(Tenant(b"")) for _ in range(20)]
    assert held.num_requests == 20
    for ticket in tickets:
        ticket.release()


def test_a_key_holds_sequences_not_requests() -> None:
    held = admission(max_sequences_per_key=10)
    with held.open(Tenant(b"a")) as eight, held.open(Tenant(b"a")) as two:
        eight.reserve(8, 1)
        two.reserve(1, 1)
        with pytest.raises(ApiError, match=r"holds 9 sequences .* asks for 2 more; it may hold 10"):
            two.reserve(3, 1)
        two.reserve(1, 1)
    assert not held._by_key


@pytest.mark.parametrize(("keys", "own", "most"), [(1, 5, 5), (3, 0, 8), (3, 5, 5)])
def test_more_than_a_key_ever_gets_is_the_requests_fault(keys: int, own: int, most: int) -> None:
    """Whatever others hold: with 10 places, one of several keys gets 8."""
    held = admission(max_queued_sequences=8, max_sequences_per_key=own)
    held.num_keys = keys
    with held.open(Tenant(b"a")) as ticket, held.open(Tenant(b"b")) as other:
        other.reserve(1, 1)
        with pytest.raises(ApiError, match=rf"may hold {most} at most: ask for fewer") as caught:
            ticket.reserve(most + 1, 1)
        assert (code(caught), caught.value.status) == ("limit_exceeded", 400)
        assert not [name for name, _ in caught.value.headers if name == b"retry-after"]
    with held.open(Tenant(b"a")) as ticket:
        ticket.reserve(most, 1)


def test_the_only_key_may_hold_all() -> None:
    held = admission(max_queued_sequences=98)
    held.num_keys = 1
    with held.open(Tenant(b"a")) as ticket:
        ticket.reserve(100, 1)


def test_of_several_keys_none_takes_the_last_places() -> None:
    """Two keys take what they get; a third, and a fourth, still find room."""
    held = admission(max_queued_sequences=998)
    held.num_keys = 4
    tickets: list[Ticket] = []
    codes: set[str] = set()

    def flood(key: bytes) -> int:
        while True:
            try:
                tickets.append(held.open(Tenant(key)))
            except ApiError as refused:
                codes.add(refused.code)
                return held._by_key[key]

    assert flood(b"a") == 888  # 8 of 9
    assert flood(b"b") >= 90
    tickets += [held.open(Tenant(key)) for key in (b"c", b"d")]
    for ticket in tickets:
        ticket.release()
    tickets.clear()
    while held._by_key[b"a"] < 470:  # in turn: 8 of 17 each
        tickets += [held.open(Tenant(b"a")), held.open(Tenant(b"b"))]
    assert flood(b"a") == 471
    assert held._by_key[b"b"] == 470
    assert codes == {"rate_limit_exceeded"}


def test_open_requests_are_capped_before_their_bodies_are_read() -> None:
    held = admission(max_queued_sequences=2)
    tickets = [held.open(Tenant(b"")) for _ in range(8)]
    with pytest.raises(ApiError) as caught:
        held.open(Tenant(b""))
    assert code(caught) == "overloaded"
    for ticket in tickets:
        ticket.release()


def test_random_use_never_exceeds_a_ceiling_and_ends_at_zero() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    held = admission(max_queued_sequences=6, max_held_body_bytes=50, max_sequences_per_key=5)
    active: list[Ticket] = []
    for _ in range(2000):
        try:
            if active and rng.random() < 0.5:
                active.pop(rng.randrange(len(active))).release()
            else:
                active.append(held.open(Tenant(rng.choice([b"", b"a", b"b"]))))
                active[-1].hold_bytes(rng.randrange(30))
                active[-1].reserve(rng.randrange(1, 9), rng.randrange(1, 300))
        except ApiError:
            pass
        assert 0 <= held.num_sequences <= held.max_sequences
        assert 0 <= held.num_tokens <= held.max_tokens
        assert 0 <= held.num_bytes <= 50
        assert held.num_requests == len(active)
    for ticket in active:
        ticket.release()
    assert (held.num_requests, held.num_bytes, held.num_sequences, held.num_tokens) == (0, 0, 0, 0)
