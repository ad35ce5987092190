"""Is docs/metrics.md what the declared metrics make of it?"""

from __future__ import annotations

from pathlib import Path

from tools.docs_metrics import page

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"


def test_the_page_is_up_to_date() -> None:
    again = "run `make docs` and commit the page"
    assert PAGE.read_text(encoding="utf-8") == page(), again
