"""Do connections share places and turns of the event loop, whoever has many? Without a network, but
for what accepts."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ridgeline.server.config import Limits
from ridgeline.server.connections import PER_TURN, Places, Slices
from ridgeline.server.lifecycle import ACCEPTS_PER_TURN, Http, listen, uvicorn_config
from tests.server.connection import Connection, Server

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
MANY = 100


class Loop(asyncio.SelectorEventLoop):
    """Its time stands until it is moved."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def turn(self) -> None:
        self.call_soon(self.stop)
        self.run_forever()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def most_in_a_turn(loop: Loop, connections: list[Connection]) -> int:
    """Until all are over: how many became so in one turn."""
    seen = [0]
    while seen[-1] < len(connections):
        loop.turn()
        seen.append(sum(connection.is_over for connection in connections))
        assert len(seen) < 20 * MANY, "they do not end"
    return max(after - before for before, after in itertools.pairwise(seen))


@pytest.mark.parametrize("head", [GET, POST, b""], ids=["head", "body", "silent"])
def test_who_is_late_together_is_cut_in_slices(loop: Loop, head: bytes) -> None:
    server = Server(loop, header_timeout_s=5.0, body_timeout_s=5.0)
    connections = [server.connect() for _ in range(MANY)]
    for connection in connections:
        if head:
            connection.send(head)
    for _ in range(MANY):
        loop.turn()
    loop.now += 6.0
    assert most_in_a_turn(loop, connections) <= PER_TURN
    for connection in connections:
        assert connection.pipe.written.startswith(b"HTTP/1.1 408 " if head else b"")
        connection.leave()
    server.settle()
    assert not server.faults


def test_requests_that_come_together_begin_in_slices(loop: Loop) -> None:
    server = Server(loop)
    for _ in range(MANY):
        server.connect().send(POST)
    begun = [0]
    while begun[-1] < MANY:
        begun.append(len(server.state.tasks))
        loop.turn()
    assert max(b - a for a, b in itertools.pairwise(begun)) <= PER_TURN
    for connection in server.state.connections.copy():
        connection.connection_lost(None)
    for _ in range(MANY):
        loop.turn()
    assert not server.state.connections
    assert not server.state.tasks


def test_a_probe_begins_before_all_who_wait(loop: Loop) -> None:
    server = Server(loop)
    for _ in range(MANY):
        server.connect().send(POST)
    probe = server.connect()
    probe.send(GET.replace(b"/ ", b"/health/live ") + b"\r\n")
    for _ in range(3):
        loop.turn()
    assert probe.pipe.written.startswith(b"HTTP/1.1 200 ")
    assert len(server.methods) < MANY
    for connection in server.state.connections.copy():
        connection.connection_lost(None)
    for _ in range(MANY):
        loop.turn()


def test_slices_keep_the_order(loop: Loop) -> None:
    slices, done = Slices(), []
    for number in range(MANY):
        slices.do(loop, lambda number=number: done.append(number))  # type: ignore[misc]
    assert len(done) == PER_TURN
    loop.turn()
    slices.do(loop, lambda: done.append(MANY))
    while len(done) <= MANY:
        before = len(done)
        loop.turn()
        assert before < len(done) <= before + PER_TURN
    assert done == [*range(MANY + 1)]


def test_a_crowd_is_accepted_in_slices(loop: Loop) -> None:
    """By asyncio's own loop, too; and it may wait in the system's queue meanwhile."""
    with listen("127.0.0.1", 0) as sock, ExitStack() as stack:
        http = Http(uvicorn_config(Limits(), Server(loop).app))
        http.config.load()
        http.lifespan = http.config.lifespan_class(http.config)
        loop.run_until_complete(http.startup([sock]))
        for _ in range(MANY):  # the loop stands still
            stack.enter_context(socket.create_connection(sock.getsockname(), 10))
        num_open = [0]
        while num_open[-1] < MANY:
            loop.turn()
            num_open.append(len(http.server_state.connections))
        assert max(b - a for a, b in itertools.pairwise(num_open)) <= ACCEPTS_PER_TURN
        for connection in http.server_state.connections:
            connection.transport.abort()
        for server in http.servers:
            server.close()
        for _ in range(10):
            loop.turn()


# ------------------------------------------------------------------ places


def taken(places: Places, address: str) -> int:
    """How many connections an address gets that asks without end."""
    count = 0
    while places.take(address) is None:
        count += 1
    return count


def test_no_address_takes_the_last_places() -> None:
    places = Places(Limits(max_connections=900))
    assert taken(places, "10.0.0.1") == 800
    refusal = places.take("10.0.0.1")
    assert refusal is not None
    assert (refusal.status, refusal.code) == (429, "rate_limit_exceeded")
    assert "your address holds 800 connections" in refusal.message
    assert "--max-connections" in refusal.message
    assert places.take("10.0.0.2") is None
    assert taken(places, "10.0.0.3") > 80
    for _ in range(200):
        places.give_back("10.0.0.1")
    assert places.take("10.0.0.1") is None
    for _ in range(601):
        places.give_back("10.0.0.1")
    assert "10.0.0.1" not in places._held


def test_few_places_are_anybodys_and_full_is_full() -> None:
    for most in (1, 8):
        places = Places(Limits(max_connections=most))
        assert taken(places, "10.0.0.1") == most
        refusal = places.take("10.0.0.2")
        assert refusal is not None
        assert refusal.code == "overloaded"
    operators = Places(Limits(max_connections=16), shared=False)
    assert taken(operators, "10.0.0.1") == 16


def test_a_network_of_ipv6_is_one_address() -> None:
    places = Places(Limits(max_connections=90))
    assert taken(places, "2001:db8::1") == 80
    for same in ("2001:db8::2", "2001:db8:0:0:ffff::"):
        assert places.take(same) is not None
    for other in ("2001:db8:0:1::", "::ffff:10.0.0.1", "::1", "fe80::1%eth0"):
        assert places.take(other) is None


def test_a_refused_connection_reads_why_and_takes_no_place(loop: Loop) -> None:
    server = Server(loop, max_connections=18)
    crowd = [server.connect("10.0.0.1") for _ in range(17)]
    reply = bytes(crowd[-1].pipe.written)
    assert reply.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert b"\r\nretry-after: 1\r\n" in reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "rate_limit_exceeded"
    assert not crowd[0].pipe.written
    other = server.connect("10.0.0.2")
    other.send(GET + b"\r\n")
    server.settle()
    assert other.pipe.written.startswith(b"HTTP/1.1 200 ")
    for connection in (*crowd, other):
        connection.leave()
    places = other.protocol.places
    assert (places._held.total(), places.num_refused) == (0, 0)
