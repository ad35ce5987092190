"""What does a new field of a request cost, or a new option of the engine? One declaration, and the
line that acts on it.

In a copy of the package, in which all but the changed files are links to ours.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The script that looks for the field everywhere -> file -> a line of it, and what stands there
# then.
Places = Mapping[str, tuple[str, str]]
FIELDS: dict[str, Places] = {
    "use_request_field": {
        "ridgeline/request.py": (
            "    ignore_eos: Annotated[\n",
            '    shouts: Annotated[bool, says("the answer in capitals")] = False\n'
            "    ignore_eos: Annotated[\n",
        ),
        "ridgeline/text/assemble.py": (
            '        text = "".join(texts)\n',
            '        text = "".join(texts).upper() if self._sampling.shouts else "".join(texts)\n',
        ),
    },
    "use_engine_option": {
        "ridgeline/config.py": (
            "    enforce_eager: Annotated[\n",
            '    tiny_steps: Annotated[bool, says("at most 64 tokens in one step")] = False\n'
            "    enforce_eager: Annotated[\n",
        ),
        "ridgeline/resolve.py": (
            "    batched = config.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[kind]\n",
            "    batched = config.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[kind]\n"
            "    batched = min(batched, 64) if config.tiny_steps else batched\n",
        ),
    },
}


def linked(folder: Path, places: Places) -> None:
    """Links in `folder` to all of the checkout but for the changed files, which are written."""
    changed = {ROOT / name for name in places}
    above = {parent for path in changed for parent in path.parents}
    for path in (ROOT / "tests", ROOT / "tools", ROOT / "docs"):
        (folder / path.name).symlink_to(path)
    pending = [ROOT / "ridgeline"]
    while pending:
        path = pending.pop()
        target = folder / path.relative_to(ROOT)
        if path in above:
            target.mkdir()
            pending += path.iterdir()
        elif path not in changed and path.name != "__pycache__":
            target.symlink_to(path)
    for name, (before, after) in places.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert text.count(before) == 1, name
        (folder / name).write_text(text.replace(before, after), encoding="utf-8")


@pytest.mark.parametrize("script", FIELDS)
def test_a_field_is_one_declaration_and_the_line_that_acts_on_it(
    script: str, tmp_path: Path
) -> None:
    linked(tmp_path, FIELDS[script])
    run = subprocess.run(
        [sys.executable, "-B", "-m", f"tests.extensions.{script}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert str(tmp_path) in run.stdout  # it was the copy
