"""Do the flows of the openai client go as they should? `make test-clients` has more clients."""

from __future__ import annotations

import sys

from tools.clients.__main__ import CLIENTS, HERE, both_servers, outcomes


def test_flows_of_the_openai_client() -> None:
    client = CLIENTS["openai"]
    with both_servers() as urls:
        found = outcomes("openai", client, [sys.executable, str(HERE / client.script)], urls)
    failed = [outcome for outcome in found if outcome.state == "FAILED"]
    assert not failed, failed
    assert sum(outcome.state == "ok" for outcome in found) >= 16
