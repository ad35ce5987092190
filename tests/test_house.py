"""Does the package stay small, with each fact in one place? A raised limit needs its reason."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

from tests.test_architecture import PACKAGE, dotted, modules, nodes, of_ours, tree

# Lines of Python, C++ and CUDA of each room; "" are the modules beside the rooms. What is meant
# are 66,000 in all, 320 files and 30 protocols: each change lowers these numbers.
MAX_LINES = {
    # The words and bounds of options, told by the commands until now; two long functions cut.
    "": 5_640,
    "architectures": 3_980,
    "attention": 1_690,
    "benchmark": 1_150,
    "cli": 6_255,
    "compression": 1_175,
    "cost": 5_265,
    "demo": 40,
    "devices": 530,
    "distributed": 75,
    "evaluation": 745,
    "executor": 3_345,
    "kernels": 23_030,
    "kvcache": 410,
    "layers": 1_415,
    "loader": 2_970,
    "measure": 2_910,
    "observe": 2_775,
    "planner": 1_305,
    "quantization": 2_815,
    "router": 150,
    "sampling": 900,
    "scheduler": 3_520,
    "server": 8_715,  # the words of its options
    "simulator": 1_910,
    "speculation": 2_470,
    "text": 2_105,
}
MAX_FILES = 407  # of Python
MAX_PROTOCOLS = 36
MAX_FUNCTION_LINES = 80
LONGER = {  # that are to be made shorter, not longer
    "ridgeline.kernels.stream_linear.stream_linear": 81,
}
MIN_MODULE_LINES = 60  # a shorter one that a single module imports belongs into it
SHORT_ALONE = {
    "ridgeline.__main__": "Python looks for it",
    "ridgeline.architectures.llama": "a line of FAMILIES",
    "ridgeline.architectures.mistral": "a line of FAMILIES",
    "ridgeline.architectures.mixtral": "a line of FAMILIES",
    "ridgeline.architectures.qwen2": "a line of FAMILIES",
    "ridgeline.architectures.qwen3": "a line of FAMILIES",
    "ridgeline.attention.reference": "a line of ATTENTION_BACKENDS",
    "ridgeline.cli.completion": "a command",
    "ridgeline.devices.device": "the contract of a device",
    "ridgeline.kernels.silu_mul_triton": "loaded where there is Triton",
    "ridgeline.scheduler.policies.fcfs": "a line of POLICIES",
    "ridgeline.scheduler.policies.priority": "a line of POLICIES",
    "ridgeline.speculation.prompt_lookup": "a line of DRAFT_METHODS",
    # To be merged.
    "ridgeline.speculation.early_layers": "",
}
# Words that nobody outside knew, and the field's own that are used in their place.
BANNED = {
    "guess guesses guessed guesser guessing": "draft",
    "receipt receipts": "request cost",
    "observatory": "run record",
    "manner manners": "execution mode",
    "roomy": "tokens with slots",
    "bypasses veteran": "starvation limit",
    "ledger": "state",
    "company": "batch",
    "tall": "large M",
    "shortcut": "synthetic KV",
    "readout": "run summary",
}


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def importers() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {dotted(path): set() for path in modules()}
    for path in modules():
        for name in of_ours(path) - {dotted(path)}:
            found.setdefault(name, set()).add(dotted(path))
    return found


def test_each_room_keeps_its_lines() -> None:
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*"):
        if path.suffix in {".py", ".cpp", ".h", ".cu"}:
            inside = path.relative_to(PACKAGE).parts
            lines[inside[0] if len(inside) > 1 else ""] += num_lines(path)
    print(f"\n{sum(lines.values())} lines: {dict(lines.most_common())}")
    over = {room: n for room, n in lines.items() if n > MAX_LINES.get(room, 0)}
    assert not over, f"more lines than MAX_LINES says: {over}"
    loose = {room: lines[room] for room, most in MAX_LINES.items() if lines[room] < 0.85 * most}
    assert not loose, f"lower MAX_LINES: {loose}"


def test_there_are_no_more_files_and_protocols() -> None:
    classes = [n for path in modules() for n in nodes(tree(path)) if isinstance(n, ast.ClassDef)]
    protocols = [n for n in classes if any("Protocol" in ast.unparse(base) for base in n.bases)]
    print(f"\n{len(modules())} files, {len(protocols)} protocols")
    assert len(modules()) <= MAX_FILES
    assert len(protocols) <= MAX_PROTOCOLS


def test_functions_are_short() -> None:
    """Those that Triton compiles apart."""
    long = {
        f"{dotted(path)}.{node.name}": lines
        for path in modules()
        for node in nodes(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
        and not any("jit" in ast.unparse(mark) for mark in node.decorator_list)
    }
    over = {name: lines for name, lines in long.items() if lines > LONGER.get(name, 0)}
    assert not over, f"over {MAX_FUNCTION_LINES} lines: {over}"
    assert LONGER.keys() == long.keys(), "a function of LONGER is short now"


def test_a_short_module_has_several_importers() -> None:
    known = importers()
    short = {
        dotted(path)
        for path in modules()
        if path.name != "__init__.py"
        and num_lines(path) < MIN_MODULE_LINES
        and len(known[dotted(path)]) <= 1
    }
    assert short <= SHORT_ALONE.keys(), f"merge with the importer: {short - SHORT_ALONE.keys()}"
    assert SHORT_ALONE.keys() <= short, f"take from SHORT_ALONE: {SHORT_ALONE.keys() - short}"


def test_nothing_is_there_for_tests_alone() -> None:
    """A module is imported, or named in a table or by a command."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in modules())
    known = importers()
    unused = {
        name
        for path in modules()
        if path.name not in ("__init__.py", "__main__.py")
        and not known[name := dotted(path)]
        and not re.search(rf"[\"'`\s]{re.escape(name)}\b", text)
        and not name.startswith("ridgeline.cli.")
        and not name.startswith("ridgeline.architectures.")
    }
    assert not unused, f"only tests need {unused}"


def test_words_of_the_house_stay_away() -> None:
    """From the names of the package."""
    banned = {word: better for words, better in BANNED.items() for word in words.split()}
    found = {
        (dotted(path), token.string): banned[part.lower()]
        for path in modules()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
        if token.type == tokenize.NAME
        for part in re.findall(r"[A-Z]?[a-z0-9]+", token.string)
        if part.lower() in banned
    }
    assert not found, f"say it in the field's words: {found}"
