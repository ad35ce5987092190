"""Every hostile folder is refused in one line, without a crash, a hang or much memory."""

from __future__ import annotations

import pytest

from tests.loader.hostile import CASES, import_all, load_in_child

MAX_BYTES = 500 << 20
MAX_CPU_S = 5.0  # most take a hundredth; seconds on the clock of a busy machine say nothing


@pytest.mark.parametrize("kind", dict.fromkeys(name.partition(":")[0] for name in CASES))
def test_hostile_folders_are_refused(kind: str) -> None:
    import_all()
    names = [name for name in CASES if name.startswith(f"{kind}:")]
    found = dict(load_in_child(names))
    for name, outcome in found.items():
        assert outcome.error == "ConfigError", (name, outcome)
        assert CASES[name].fits(outcome.message), (name, outcome)
        assert "\n" not in outcome.message, (name, outcome)
        assert len(outcome.message) < 1000, (name, outcome)
        assert outcome.num_bytes < MAX_BYTES, (name, outcome)
        assert outcome.cpu_s < MAX_CPU_S, (name, outcome)
    assert list(found) == names
