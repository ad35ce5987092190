"""The small parts that need no server: errors, keys, hosts, streams, slots, deadlines."""

from __future__ import annotations

import asyncio
import hmac
import json
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.answer import Answer, ChoiceDelta
from ridgeline.errors import ConfigError, InternalError, RequestFault
from ridgeline.request import RequestOutput, SamplingParams
from ridgeline.server.active_request import ActiveRequest, merge
from ridgeline.server.auth import ADMIN, ORDINARY, RIGHTS, Keys, Tenant, load_keys
from ridgeline.server.config import Limits
from ridgeline.server.deadlines import ServiceRate, enforce
from ridgeline.server.errors import ApiError, from_fault, quote
from ridgeline.server.hosts import HostGuard, check_admin_bind, check_bind, is_loopback
from ridgeline.server.replies import EventStream, State

# ------------------------------------------------------------------ errors


def test_an_error_body_has_one_shape() -> None:
    error = ApiError("overloaded", "too much\nwork\x00" + "x" * 1000, "a" * 100)
    body = json.loads(error.body())
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["type"] == "server_error"
    assert (error.status, error.headers) == (503, [(b"retry-after", b"1")])
    assert len(body["error"]["message"]) == 500
    assert body["error"]["message"].isprintable()
    assert len(body["error"]["param"]) == 64


def test_codes_of_faults_and_renamed_fields() -> None:
    fault = RequestFault("too long", param="prompt", code="context_length_exceeded")
    assert from_fault(fault, {"prompt": "messages"}).param == "messages"
    nested = RequestFault("no", param="prompt[3]")
    assert from_fault(nested, {"prompt": "messages"}).param == "messages[3]"
    assert from_fault(nested).status == 400


def test_quoting_is_short_and_harmless() -> None:
    assert quote("a\r\nb\x1b[31m") == "'a??b?[31m'"
    assert len(quote("y" * 5000)) <= 66


# ------------------------------------------------------------------ who may ask


def keys_of(*keys: str) -> Keys:
    digests = [sha256(key.encode()).digest() for key in keys]
    return Keys(tuple(Tenant(digest, digest, rights=ORDINARY) for digest in digests))


def test_keys_are_checked_whole() -> None:
    keys = keys_of("first-key-1", "second-key-2")
    assert keys.check(b"Bearer first-key-1") == keys.check(b"bearer  first-key-1 ")
    assert keys.check(b"Bearer first-key-1") != keys.check(b"Bearer second-key-2")
    for wrong in (None, b"", b"first-key-1", b"Basic first-key-1", b"Bearer first-key-", b"Bearer"):
        with pytest.raises(ApiError) as caught:
            keys.check(wrong)
        assert caught.value.status == 401
        assert (b"www-authenticate", b"Bearer") in caught.value.headers
    assert Keys().check(None, "::1").key == b""
    assert Keys().check(None, "::1").may(ADMIN)
    assert Keys().check(None, "::1").name != Keys().check(None, "::2").name


def test_every_key_is_compared_whatever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by the function that takes as long for any two digests."""
    keys = keys_of(*(f"key-number-{i}" for i in range(5)))
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, given)

    monkeypatch.setattr("ridgeline.server.auth.hmac", SimpleNamespace(compare_digest=compare))
    for given in (b"Bearer key-number-0", b"Bearer key-number-4", b"Bearer wrong", None):
        compared.clear()
        with suppress(ApiError):
            keys.check(given)
        assert len(set(compared)) == 5


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for tests\nalpha-key-1\n\n  beta-key-22  \n")
    keys = load_keys(str(path), "gamma-key-3")
    for key in (b"alpha-key-1", b"beta-key-22", b"gamma-key-3"):
        keys.check(b"Bearer " + key)
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_keys(str(path), None)
    path.write_text("# one\nshort\n")
    with pytest.raises(ConfigError, match=r"keys, line 2: .* 8 to 512"):
        load_keys(str(path), None)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(str(tmp_path / "missing"), None)
    assert not load_keys(None, None)
    with pytest.raises(ConfigError, match=r"RIDGELINE_API_KEY: .* 8 to 512"):
        load_keys(None, "short")


def test_a_key_has_a_name_a_weight_and_rights(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = sha256(b"hashed-key").hexdigest().upper()
    path.write_text(
        "plain-key\n"
        "alice-key name=alice weight=2.5 rights=answer,explain\n"
        f"sha256:{digest}\tname=bob\n"
        "  # a comment\n"
        "admin-key rights=admin\n"
    )
    keys = load_keys(str(path), None)
    plain, alice, bob, admin = (
        keys.check(b"Bearer " + key)
        for key in (b"plain-key", b"alice-key", b"hashed-key", b"admin-key")
    )
    assert (plain.label, plain.weight, plain.rights) == ("", 1.0, ORDINARY)
    assert (alice.label, alice.weight) == ("alice", 2.5)
    assert alice.rights == {"answer", "explain"}
    assert (bob.label, bob.weight, bob.rights) == ("bob", 1.0, ORDINARY)
    assert all(admin.may(right) for right in (*RIGHTS, ADMIN))
    assert not any(tenant.may("metrics") for tenant in (plain, alice, bob))
    with pytest.raises(ApiError):
        keys.check(f"Bearer sha256:{digest}".encode())
    assert alice.key == alice.name == sha256(b"alice-key").digest()


def test_the_operators_key_and_a_key_alone_may_everything(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def rights(content: str, environment: str | None, key: str) -> frozenset[str]:
        path.write_text(content)
        return load_keys(str(path), environment).check(f"Bearer {key}".encode()).rights

    assert load_keys(None, "lone-key").check(b"Bearer lone-key").rights == {ADMIN}
    assert rights("lone-key name=x\n", None, "lone-key") == {ADMIN}
    assert rights("lone-key rights=answer\n", None, "lone-key") == {"answer"}
    assert rights("first-key\nother-key\n", None, "first-key") == ORDINARY
    assert rights("first-key\n", "operators", "first-key") == ORDINARY
    assert rights("first-key\n", "operators", "operators") == {ADMIN}
    assert rights("first-key rights=answer\n", "first-key", "first-key") == {"answer"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("secret-key secret-too", "behind the key"),
        ("secret-key secret=too", "behind the key"),
        ("secret-key name=", "a name has"),
        ("secret-key name=a/b", "a name has"),
        ("secret-key name=x name=y", "name= stands there twice"),
        ("secret-key name=first", "an earlier key has the same name"),
        ("first-key name=again", "an earlier line has the same key"),
        ("secret-key weight=much", "weight must be a number from 0.001 to 1000"),
        ("secret-key weight=0", "from 0.001 to 1000"),
        ("secret-key weight=nan", "from 0.001 to 1000"),
        ("secret-key rights=", "rights are answer, tokenize, explain, metrics and admin"),
        ("secret-key rights=answer,secret", "rights are"),
        ("sha256:secret", "64 hexadecimal digits"),
        ("secret-k\u00e9y", "8 to 512 ASCII"),
    ],
)
def test_a_wrong_line_is_named_and_no_key_told(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# two\nfirst-key name=first\n{line}\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_keys(str(path), None)
    assert str(caught.value).startswith(f"api_key_file {path}, line 3: ")
    assert words in str(caught.value)
    assert "secret" not in str(caught.value).replace(str(path), "")


def test_the_network_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="no API key"):
            check_bind(host, has_keys=False, allow_anyone=False)
        check_bind(host, has_keys=True, allow_anyone=False)
        check_bind(host, has_keys=False, allow_anyone=True)
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_bind(host, has_keys=False, allow_anyone=False)


def test_an_admin_port_for_the_network_needs_an_operators_key() -> None:
    for keys in (Keys(), keys_of("first-key", "other-key")):
        check_admin_bind("127.0.0.1", keys)
        with pytest.raises(ConfigError, match=r"admin_host 0\.0\.0\.0 .* rights=admin"):
            check_admin_bind("0.0.0.0", keys)
    check_admin_bind("0.0.0.0", load_keys(None, "operators"))


def test_host_guard() -> None:
    guard = HostGuard("127.0.0.1", ("my.name",))
    for host in (b"localhost", b"LOCALHOST:80", b"127.0.0.1:8000", b"[::1]:80", b"my.name:1"):
        guard.check([host])
    for hosts in ([], [b"evil.example"], [b""], [b"localhost", b"localhost"], [b"localhost.evil"]):
        with pytest.raises(ApiError) as caught:
            guard.check(hosts)
        assert caught.value.status == 421
    HostGuard("0.0.0.0", ()).check([b"anything"])


# ------------------------------------------------------------------ streams


class Sent:
    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)


def test_a_stream_that_succeeds_says_done_once() -> None:
    sent = Sent()

    async def go() -> None:
        stream = EventStream(sent)
        await stream.write(b"data: 1\n\n")
        await stream.keep_alive()
        await stream.finish(b"data: 2\n\n")
        assert stream.state is State.ENDED
        for again in (stream.write(b"x"), stream.finish(b"")):
            with pytest.raises(InternalError):
                await again

    asyncio.run(go())
    assert sent.messages[0]["status"] == 200
    assert sent.body == b"data: 1\n\n: keepalive\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert [m.get("more_body") for m in sent.messages[1:]] == [True, True, False]


def test_a_stream_that_fails_has_no_done() -> None:
    sent = Sent()

    async def go() -> None:
        stream = EventStream(sent)
        await stream.write(b"data: 1\n\n")
        await stream.fail(ApiError("shutting_down", "bye"))
        with pytest.raises(InternalError):
            await stream.fail(ApiError("shutting_down", "bye"))

    asyncio.run(go())
    assert b"[DONE]" not in sent.body
    assert json.loads(sent.body.split(b"data: ")[2])["error"]["code"] == "shutting_down"


def test_before_the_first_byte_an_error_keeps_its_status() -> None:
    sent = Sent()

    async def go() -> None:
        with pytest.raises(ApiError):
            await EventStream(sent).fail(ApiError("queue_timeout", "late"))

    asyncio.run(go())
    assert sent.messages == []


# ------------------------------------------------------------------ slots and deadlines


def one_answer(**sampling: Any) -> Answer:
    params = SamplingParams(max_tokens=100, seed=1, **sampling)
    return Answer("q", (1, 2), params, tokenizer=None, end_token_ids=frozenset(), arrival_time=0.0)


def active_of(answer: Answer, streams: bool = True, max_bytes: int = 10_000) -> ActiveRequest:
    return ActiveRequest([answer], streams=streams, max_bytes=max_bytes, arrival=0.0)


def test_pieces_of_one_choice_are_joined() -> None:
    pieces = [
        ChoiceDelta(0, "a", (1,)),
        ChoiceDelta(1, "x", (7,)),
        ChoiceDelta(0, "b", (2,)),
        ChoiceDelta(0, "", (), (), "stop", "end"),
    ]
    assert merge(pieces) == [
        ChoiceDelta(0, "ab", (1, 2), (), "stop", "end"),
        ChoiceDelta(1, "x", (7,)),
    ]


def test_a_reader_that_lags_too_far_is_cut() -> None:
    async def go() -> None:
        active, cuts = active_of(one_answer(), max_bytes=200), []
        active.cut = lambda: cuts.append(1)
        for i in range(20):
            active.push(RequestOutput("q-0", (i,)))
        assert active.error is None
        for i in range(10):
            active.push(RequestOutput("q-0", (i,)))
        assert active.error is not None
        assert active.error.code == "slow_client"
        assert cuts

    asyncio.run(go())


def test_reading_makes_room_again() -> None:
    async def go() -> None:
        active = active_of(one_answer(), max_bytes=200)
        for i in range(90):
            active.push(RequestOutput("q-0", (i,)))
            if i % 20 == 19:
                (piece,) = active.take()
                assert len(piece.token_ids) == 20
        assert active.error is None

    asyncio.run(go())


@pytest.mark.parametrize(
    ("started", "now", "code"),
    [
        (False, 59.0, None),
        (False, 61.0, "queue_timeout"),
        (True, 61.0, None),
        (True, 599.0, None),
        (True, 601.0, "deadline_exceeded"),
    ],
)
def test_deadlines(started: bool, now: float, code: str | None) -> None:
    async def go() -> None:
        active = active_of(one_answer())
        active.started = started
        enforce([active], Limits(), now, ServiceRate())
        assert (active.error.code if active.error else None) == code
        if code is not None:
            assert active.admitted.exception() is active.error

    asyncio.run(go())


def test_a_stalled_write_is_cut_and_a_silent_stream_is_nudged() -> None:
    async def go() -> None:
        active, cuts = active_of(one_answer()), []
        active.cut = lambda: cuts.append(1)
        active.started = True
        enforce([active], Limits(), 14.0, ServiceRate())
        assert not active.keepalive_due
        enforce([active], Limits(), 16.0, ServiceRate())
        assert active.keepalive_due
        assert active.changed.is_set()
        active.sending_since = 16.0
        enforce([active], Limits(), 45.0, ServiceRate())
        assert not cuts
        enforce([active], Limits(), 47.0, ServiceRate())
        assert cuts

    asyncio.run(go())
