"""Do the documents name files and functions that exist?"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/life-of-a-request.md",
    "docs/speculation.md",
)


@cache
def names() -> frozenset[str]:
    """Every class, function, method and module-level or instance name of the package."""
    found: set[str] = set()
    for path in (ROOT / "ridgeline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
                found |= {f"{node.name}.{name}" for name in members(node)}
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.arg):
                found.add(node.id if isinstance(node, ast.Name) else node.arg)
    return frozenset(found)


def members(node: ast.ClassDef) -> set[str]:
    """Methods, fields and what `self` is given."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(inner.name)
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            found.add(inner.target.id)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            found.add(inner.attr)
    return found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_links_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:ridgeline|tests|tools|docs)/[\w/.-]+)`", text))
    links = re.findall(r"\]\(([\w/.-]+)\)", text)
    missing = {path for path in named if not (ROOT / path).exists()}
    missing |= {link for link in links if not ((ROOT / name).parent / link).exists()}
    assert missing == set()


def test_functions_exist() -> None:
    text = (ROOT / "docs/life-of-a-request.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", text))
    assert len(named) > 60
    assert {name for name in named if name not in names()} == set()


@pytest.mark.parametrize("name", [*DOCUMENTS, "CHANGELOG.md", "docs/performance/README.md"])
def test_documents_are_ascii(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8").isascii()
