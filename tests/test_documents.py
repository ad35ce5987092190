"""Do the documents name files, headings, functions and results that exist?"""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from ridgeline.server.errors import CODES
from tools import make_docs

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
RESULT_NAME = re.compile(r"20\d\d-\d\d-\d\d-[\w*-]+(?:\.[a-z*]+)*")


@cache
def trees() -> tuple[ast.Module, ...]:
    """Of every module of the package."""
    paths = (ROOT / "ridgeline").rglob("*.py")
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in paths)


@cache
def names() -> frozenset[str]:
    """Every class, function, method and module-level or instance name of the package."""
    found: set[str] = set()
    for tree in trees():
        for node in ast.walk(tree):
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


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ +(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def is_there(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not anchor or anchor in headings(target))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_links_exist(name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:ridgeline|tests|tools|docs|bench)/[\w/.*-]+)`", text))
    links = re.findall(r"\]\(([\w/.#-]+)\)", text)
    missing = {path for path in named if not any(ROOT.glob(path.rstrip("/")))}
    missing |= {link for link in links if not is_there(page, link)}
    assert missing == set()


def test_tests_that_are_named_exist() -> None:
    """`tests/FILE::NAME` in a page is a test that there is."""
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for file, test in re.findall(r"`(tests/[\w/.]+\.py)::(\w+)`", text):
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), (name, test)


def test_every_page_is_in_the_index() -> None:
    linked = re.findall(r"\]\(([\w/.-]+)\)", (ROOT / "docs/README.md").read_text(encoding="utf-8"))
    pages = {name.removeprefix("docs/") for name in DOCUMENTS if name.startswith("docs/")}
    assert pages - {*linked, "README.md"} == set()


def test_every_room_is_in_the_table() -> None:
    told = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("## Who may")[0]
    rooms = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "ridgeline").iterdir()
        if not path.name.startswith(("_", ".")) and path.suffix in ("", ".py")
    }
    assert {room for room in rooms if f"`{room}`" not in told} == set()


def test_the_python_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    code, printed = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)[:2]
    exec(code, {})  # the page's own
    assert capsys.readouterr().out == printed


def test_the_code_of_a_new_family_is_that_of_the_tree() -> None:
    """Each block is in the file that was named last before it, and one is all of its file."""
    text = (ROOT / "docs/new-family.md").read_text(encoding="utf-8")
    assert len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) <= 700
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    found = []
    for block in blocks:
        name = re.findall(r"`((?:ridgeline|tests)/[\w/]+\.py)`", text[: block.start()])[-1]
        found.append((ROOT / name).read_text(encoding="utf-8"))
        assert block[1] in found[-1], name
    assert len(blocks) == 4
    assert blocks[0][1] == found[0]


def test_result_files_and_their_citations() -> None:
    """A raw result stays while a page or a test cites it; what is cited is there."""
    texts = [ROOT / name for name in DOCUMENTS]
    texts += [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    cited = {
        name
        for path in texts
        for name in RESULT_NAME.findall(path.read_text(encoding="utf-8"))
        if ".json" in name or ".txt" in name
    }
    kept = {path.name for path in ROOT.glob("bench/*/results/*")} - {"latest.json"}
    assert {name for name in kept if not any(fnmatch(name, wanted) for wanted in cited)} == set()
    assert {wanted for wanted in cited if not any(fnmatch(name, wanted) for name in kept)} == set()


@pytest.mark.parametrize("page", make_docs.PAGES)
def test_reference_pages_say_what_the_code_says(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert make_docs.made(page) == text, "run `make docs` and commit the page"


def test_every_part_of_the_reference_stands_on_a_page() -> None:
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in make_docs.PAGES)
    assert sorted(found["name"] for found in make_docs.MARK.finditer(pages)) == sorted(
        make_docs.PARTS
    )


def constants() -> set[str]:
    """Every text in the package."""
    nodes = (node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {node.value for node in nodes if isinstance(node.value, str)}


def test_environment_variables_are_told() -> None:
    read = {
        word for word in constants() if re.fullmatch(r"(RIDGELINE|HF|XDG|TRITON)_[A-Z_]+", word)
    }
    told = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert {name for name in read if f"`{name}`" not in told} == set()


def test_codes_of_errors_are_declared() -> None:
    used = set()
    for path in (ROOT / "ridgeline/server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError":
                used |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    assert len(used) > 20
    assert used <= set(CODES)


def test_functions_exist() -> None:
    text = (ROOT / "docs/life-of-a-request.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", text))
    assert len(named) > 60
    assert {name for name in named if name not in names()} == set()


@pytest.mark.parametrize("name", [*DOCUMENTS, "CHANGELOG.md"])
def test_documents_are_ascii(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8").isascii()
