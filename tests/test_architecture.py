"""The rules of the house, as tests: who may import whom, and what appears nowhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ridgeline"

# A part imports from its own level and from those before it, and never in a circle.
LEVELS = (
    {"clock", "demo", "errors", "figures", "registry", "log"},
    {"declared", "request", "step", "config", "formats", "architectures", "parsers"},
    {"scheduler", "cost"},
    {"engine", "router", "observe", "speculation (pure)"},
    {"simulator", "planner"},
    {"devices", "kernels", "distributed", "startup", "imports", "frames", "child"},
    {"kvcache", "quantization"},
    {"attention", "layers"},
    {"loader", "sampling", "speculation"},
    {"executor"},
    {
        "asked",
        "resolve",
        "resolve_draft",
        "records",
        "costing",
        "build",
        "build_draft",
        "build_ranks",
        "worker",
        "text",
        "generation",
        "answer",
        "prompts",
        "compression",
        "traced",
    },
    {"llm", "server", "lab", "cli", "measure", "benchmark", "evaluation", "__main__"},
)
# Modules of a room that are pure, as the scheduler's side needs them, while the others are not.
PURE_MODULES = {
    f"ridgeline.speculation.{name}": "speculation (pure)"
    for name in ("controller", "memory", "price", "report", "step_times")
}
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
PURE = frozenset().union(*LEVELS[:5])
BANNED_IN_PURE = {"torch", "numpy", "time", "random", "threading", "asyncio", "os", "triton"}
NEVER = (  # (part, part it must not import although its level would allow it)
    ("attention", "layers"),
    ("executor", "scheduler"),
    *((front, inner) for front in LEVELS[-1] for inner in ("executor", "layers")),
)
LABORATORY = {"measure", "simulator", "planner", "benchmark", "evaluation", "lab"}
ASKED_FOR = {("ridgeline.server.app", "ridgeline.lab.app")}  # by --lab, imported then
FRONT_OF_LABORATORY = {"cli", "__main__"}  # nothing else imports it: what answers does not measure
BANNED_MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "uuid",
}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_ATTRIBUTES = {
    ("torch", "load"),
    ("time", "time"),
    ("yaml", "load"),
    ("multiprocessing", "Queue"),
    ("multiprocessing", "Pipe"),
}
BANNED_NAMES = {"trust_remote_code", "recv_pyobj", "send_pyobj", "auto_map"}
MAX_SHOWN = 12


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    """The room of a module of ours; "" for the package itself."""
    if module in PURE_MODULES:
        return PURE_MODULES[module]
    return module.partition(".")[2].partition(".")[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def nodes(root: ast.AST, *, at_import: bool = False) -> Iterator[ast.AST]:
    """All nodes; `at_import`: only those that run when the module is imported."""
    for node in ast.iter_child_nodes(root):
        if at_import and (
            is_type_checking(node)
            or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        ):
            continue
        yield node
        yield from nodes(node, at_import=at_import)


def imports_of(module: ast.Module, *, at_import: bool = False) -> Iterator[str]:
    """Full names of what `module` imports; our own modules are told from their attributes."""
    for node in nodes(module, at_import=at_import):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            deeper = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (deeper & names_of_ours()) or {node.module}


@cache
def imported(path: Path, at_import: bool = False) -> frozenset[str]:
    return frozenset(imports_of(tree(path), at_import=at_import))


@cache
def names_of_ours() -> frozenset[str]:
    return frozenset(dotted(path) for path in modules())


def of_ours(path: Path, at_import: bool = False) -> set[str]:
    return {n for n in imported(path, at_import) if n == "ridgeline" or n.startswith("ridgeline.")}


# ---------------------------------------------------------------------- directions


def test_every_part_has_a_level() -> None:
    parts = {part(dotted(path)) for path in modules()} - {""}
    assert parts <= LEVEL.keys(), f"give {sorted(parts - LEVEL.keys())} a place in LEVELS"


def test_imports_go_down() -> None:
    wrong = []
    for path in modules():
        me = part(dotted(path))
        for module in of_ours(path):
            other = part(module)
            if not me or not other or other == me:
                continue
            if LEVEL[other] > LEVEL[me] or (me, other) in NEVER:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, wrong


def test_only_commands_import_the_laboratory() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in modules()
        if part(dotted(path)) not in LABORATORY | FRONT_OF_LABORATORY
        for module in of_ours(path)
        if part(module) in LABORATORY and (dotted(path), module) not in ASKED_FOR
    ]
    assert not wrong, wrong


def test_there_is_no_import_cycle_between_modules() -> None:
    graph = {dotted(path): of_ours(path, at_import=True) - {dotted(path)} for path in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(f"modules import each other: {cycle.args[1]}")


def test_there_is_no_import_cycle_between_parts() -> None:
    graph: dict[str, set[str]] = {}
    for path in modules():
        me = part(dotted(path))
        if me:
            others = {part(module) for module in of_ours(path, at_import=True)} - {me, ""}
            graph.setdefault(me, set()).update(others)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(f"parts import each other: {cycle.args[1]}")


def test_pure_parts_are_deterministic_by_construction() -> None:
    wrong = []
    for path in modules():
        me = part(dotted(path))
        if me in PURE and me not in {"clock", "log"}:
            tops = {module.partition(".")[0] for module in imported(path)}
            wrong += [f"{path.relative_to(ROOT)} imports {m}" for m in tops & BANNED_IN_PURE]
    assert not wrong, wrong


def test_pure_parts_load_no_tensor_library() -> None:
    pure = [dotted(path) for path in modules() if part(dotted(path)) in PURE]
    code = f"""
import sys
for name in {["ridgeline", *pure]!r}:
    __import__(name)
loaded = {{"torch", "numpy", "triton", "transformers"}} & set(sys.modules)
sys.exit(f"loaded {{sorted(loaded)}}" if loaded else 0)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


# ---------------------------------------------------------------------- what appears nowhere


def offences(module: ast.Module) -> Iterator[str]:
    """What `module` holds that must not be: line, then what it is."""
    for node in nodes(module):
        what = ""
        if isinstance(node, ast.Assert):
            what = "assert (use errors.check)"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            what = f"{node.func.id}()" if node.func.id in BANNED_CALLS else ""
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pair = (node.value.id, node.attr)
            what = ".".join(pair) if pair in BANNED_ATTRIBUTES else ""
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            what = "bare except"
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            is_off = isinstance(node.value, ast.Constant) and node.value.value is False
            what = "" if is_off else "shell="
        if isinstance(node, ast.keyword) and _is_refusal(node):
            continue
        words = [getattr(node, key, None) for key in ("id", "attr", "arg", "value")]
        what = what or next((word for word in BANNED_NAMES if word in words), "")
        if what:
            yield f"{getattr(node, 'lineno', '?')} {what}"
    for name in imports_of(module):
        if name.partition(".")[0] in BANNED_MODULES:
            yield f"imports {name}"


def _is_refusal(node: ast.keyword) -> bool:
    """Remote code is turned off by name."""
    is_off = isinstance(node.value, ast.Constant) and node.value.value is False
    return node.arg == "trust_remote_code" and is_off


def test_nothing_dangerous_appears() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{offence}"
        for path in modules()
        for offence in offences(tree(path))
    ]
    assert not found, found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(x)",
        "eval(x)",
        "exec(x)",
        "assert x",
        "subprocess.run(x, shell=True)",
        "f(trust_remote_code=True)",
        "x['auto_map']",
        "now = time.time()",
        "try:\n    pass\nexcept:\n    pass",
    ],
)
def test_the_ban_list_bites(line: str) -> None:
    assert list(offences(ast.parse(line)))


def test_the_ban_list_spares_what_is_harmless() -> None:
    assert not list(
        offences(ast.parse("time.monotonic()\nmodel.eval()\nre.compile(x)\nf(shell=False)"))
    )


# ---------------------------------------------------------------------- sizes, only shown


def test_sizes_are_shown() -> None:
    """A habit, not a law: files around 400 lines, functions around 60, the median at most 10."""
    files, functions = [], []
    for path in modules():
        files.append((len(path.read_text(encoding="utf-8").splitlines()), dotted(path)))
        for node in nodes(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append((length, f"{dotted(path)}.{node.name}"))
    lengths = sorted(length for length, _ in functions)
    print(f"\n{len(files)} files, {sum(n for n, _ in files)} lines, {len(functions)} functions")
    print(f"median function {lengths[len(lengths) // 2]} lines")
    for title, rows in (("files", files), ("functions", functions)):
        print(f"longest {title}:")
        for length, name in sorted(rows, reverse=True)[:MAX_SHOWN]:
            print(f"  {length:5} {name}")
    assert files
