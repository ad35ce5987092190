"""Does the event loop go on serving others while it reads and tokenizes something huge?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import PATIENCE_S, Running, fake_config, running


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = {"max_model_len": 1_000_000, "num_blocks": 100_000}
    with running(fake_config(fake_model, {}, engine), tmp_path_factory.mktemp("server")) as made:
        yield made


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


HUGE: dict[str, tuple[str, dict[str, Any]]] = {
    "one long prompt": ("/tokenize", {"prompt": "ab " * 700_000}),
    "one endless word": ("/tokenize", {"prompt": "x" * 1_500_000}),
    "a long message": ("/tokenize", {"messages": [message("ab " * 300_000)]}),
    "many messages": ("/v1/chat/completions", {"messages": [message("a")] * 60_000}),
}


@pytest.mark.parametrize(("path", "body"), HUGE.values(), ids=HUGE.keys())
def test_probes_are_answered_meanwhile(server: Running, path: str, body: dict[str, Any]) -> None:
    """No probe may wait for as much as half of the work: it would if the work kept the interpreter
    to itself. A share, not a time, so that a slow machine does not matter."""
    data = json.dumps(body)
    assert len(data) < 4 << 20
    statuses: list[int] = []

    def ask() -> None:
        with server.http as http:
            headers = {"content-type": "application/json"}
            statuses.append(http.post(path, content=data, headers=headers).status_code)

    thread = threading.Thread(target=ask)
    waits: list[float] = []
    with server.http as http:
        assert http.get("/health/live").is_success
        start = last = time.monotonic()
        thread.start()
        while thread.is_alive():
            assert http.get("/health/live").is_success
            waits.append(time.monotonic() - last)
            last = time.monotonic()
        whole = last - start
    thread.join(PATIENCE_S)
    assert statuses[0] in (200, 400)
    print(f"{len(waits)} probes, the longest {max(waits):.3f} s of {whole:.3f} s")
    assert max(waits) < 0.5 * whole
