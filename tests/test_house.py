"""Does the package stay small, with each fact in one place? A raised limit needs its reason."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

from ridgeline.architectures import FAMILIES
from tests.test_architecture import PACKAGE, dotted, modules, nodes, of_ours, tree

# Lines of Python, C++ and CUDA of each room; "" are the modules beside the rooms. What is meant
# are 66,000 in all, 320 files and 30 protocols: each change lowers these numbers.
MAX_LINES = {
    # The words and bounds of options; two long functions cut; sizes in GB and GiB;
    # a choice of whose code computes the layers.
    "": 7_250,  # a pass of a model with all its numbers; what a text must be
    "architectures": 5_130,  # without the files of families; experts as tensors of their own
    "attention": 2_180,  # latent attention: three more backends; sinks
    "benchmark": 1_150,
    "cli": 6_540,  # shares of each device in inspect; schemas of answers; the lab
    "compression": 1_352,  # norms with a bias
    # Memories of a device, tiles of attention; stages and layers of a step one by one: for the lab.
    "cost": 6_210,  # masks of grammars; waves of groups; exchanges of experts
    "demo": 40,
    "devices": 537,
    "distributed": 2_390,  # who starts ranks, which is stuck or samples otherwise; moves
    "evaluation": 745,
    "executor": 3_900,  # masks of tokens; exchanges of experts
    "kernels": 23_900,  # experts of a rank; latent attention in fewer launches; sums of ranks
    # Without the modules of pages; models by a pasted config, a led block pool, fleets, a judge.
    "lab": 1_859,  # the last minutes of traffic under another setting
    "kvcache": 485,  # latent vectors, one for all heads
    # Latent attention, stacked experts and their choice, layer norms; Transformers' modules.
    "layers": 3_310,  # experts that change ranks; shared experts in grouped products
    "loader": 3_010,  # names that files write in other ways; keys and values made by two tensors
    "measure": 3_010,  # decoding written in several ways
    "observe": 2_495,  # how evenly experts are used; each rank
    "parsers": 850,  # formats of tool calls
    "planner": 1_410,  # ways to spread a replica, an answer in closed form
    "quantization": 3_062,  # how far off a format is, for the lab
    "router": 663,  # first tokens predicted: speeds, cached beginnings, failures
    "sampling": 1_110,  # grammars, by llguidance
    "scheduler": 3_752,  # blocks change hands together, in half the CPU time
    "server": 12_210,  # the words of its options; pages for browsers, and what they watch
    "simulator": 2_420,  # replicas that are lost, what a router sees of them; waves
    "speculation": 2_425,  # the simple form of the speed-up, a curve of it by drafts
    "text": 2_400,  # conversations with tools
}
# A family is a file and a line: it costs no room anything, and stays short.
FAMILY_FILES = {line.partition(":")[0] for line in FAMILIES.values()}
MAX_FAMILY_LINES = 130
# So is a page of the lab.
PAGES = "ridgeline.lab.pages."
MAX_PAGE_LINES = 420
MAX_FILES = 480  # of Python, families and pages apart; the lab, and what the server shows of it
MAX_PROTOCOLS = 26
MAX_FUNCTION_LINES = 80
LONGER: dict[str, int] = {}  # that are to be made shorter, not longer
MIN_MODULE_LINES = 60  # a shorter one that a single module imports belongs into it
SHORT_ALONE = {
    "ridgeline.__main__": "Python looks for it",
    "ridgeline.cli.completion": "a command",
    "ridgeline.cli.worker": "a command",
    "ridgeline.kernels.int8_rows_triton": "loaded where there is Triton",
    "ridgeline.kernels.silu_mul_triton": "loaded where there is Triton",
    "ridgeline.parsers.harmony": "a line of PARSERS",
    "ridgeline.scheduler.policies.fcfs": "a line of POLICIES",
    "ridgeline.scheduler.policies.priority": "a line of POLICIES",
    "ridgeline.speculation.prompt_lookup": "a line of DRAFT_METHODS",
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
    "pace paces": "throughput, rate",
    "flips": "sensitivity",
    "journal": "listener",
}


# What is computed in two ways, and the test that holds them equal; each kernel module that ends
# like TWIN_ENDS is one. The first way is the module of that name without the end, if no other is
# said.
TWIN_ENDS = ("_triton", "_cuda", "_gluon")
TWINS = {
    "ridgeline.cost.decode_run": ("ridgeline.cost.pricer", "cost/test_pricer.py"),
    "ridgeline.kernels.cpu.attention": ("", "kernels/cpu/test_attention.py"),
    "ridgeline.kernels.cpu.drafts": ("ridgeline.kernels.drafts", "kernels/test_drafts.py"),
    "ridgeline.kernels.cpu.elementwise": ("", "kernels/cpu/test_elementwise.py"),
    "ridgeline.kernels.cpu.packed_linear": ("", "kernels/cpu/test_packed_linear.py"),
    "ridgeline.kernels.cpu.recorder": ("", "kernels/cpu/test_record.py"),
    "ridgeline.kernels.add_norm_triton": ("ridgeline.kernels.rms_norm", "kernels/test_fused.py"),
    "ridgeline.kernels.arrival_triton": (
        "ridgeline.kernels.draw_rows",
        "kernels/test_draw_rows.py",
    ),
    "ridgeline.kernels.drafts_triton": ("", "kernels/test_drafts.py"),
    "ridgeline.kernels.latent_decode_triton": ("", "kernels/test_latent_decode.py"),
    "ridgeline.kernels.draw_rows_triton": ("", "kernels/test_draw_rows.py"),
    "ridgeline.kernels.fp8_block_linear_triton": ("", "kernels/test_fp8_block_linear.py"),
    "ridgeline.kernels.fp8_linear_triton": ("", "kernels/test_fp8_linear.py"),
    "ridgeline.kernels.grouped_experts_triton": ("", "kernels/test_grouped_experts.py"),
    "ridgeline.kernels.int4_linear_cuda": ("", "kernels/test_int4_cuda.py"),
    "ridgeline.kernels.int8_rows_triton": (
        "ridgeline.kernels.int8_linear",
        "kernels/test_int8_linear.py",
    ),
    "ridgeline.kernels.invariant_linear_triton": ("", "kernels/test_invariant_linear.py"),
    "ridgeline.kernels.large_m_linear_gluon": ("", "kernels/test_large_m_linear.py"),
    "ridgeline.kernels.paged_decode_cuda": ("", "kernels/test_paged_decode_cuda.py"),
    "ridgeline.kernels.paged_decode_triton": ("", "kernels/test_paged_decode.py"),
    "ridgeline.kernels.paged_kv_triton": ("", "kernels/test_paged_kv_triton.py"),
    "ridgeline.kernels.paged_prefill_triton": ("", "kernels/test_paged_prefill.py"),
    "ridgeline.kernels.prompt_lookup_triton": ("", "kernels/test_prompt_lookup.py"),
    "ridgeline.kernels.qk_norm_rope_write_triton": ("", "kernels/test_kv_write.py"),
    "ridgeline.kernels.quantize_rows_triton": ("", "kernels/test_quantize_rows.py"),
    "ridgeline.kernels.sample_rows_triton": ("", "kernels/test_sample_rows.py"),
    "ridgeline.kernels.silu_mul_triton": ("", "kernels/test_kernels.py"),
    "ridgeline.kernels.small_linear_triton": ("", "kernels/test_small_linear.py"),
    "ridgeline.kernels.step_inputs_triton": ("", "kernels/test_drafts.py"),
    "ridgeline.kernels.threshold_triton": (
        "ridgeline.kernels.sample_rows",
        "kernels/test_sample_rows.py",
    ),
    "ridgeline.kernels.verified_rows_triton": ("", "kernels/test_verified_rows.py"),
    "ridgeline.simulator.macro": ("ridgeline.simulator.simulation", "simulator/test_macro.py"),
    "ridgeline.speculation.verify": (
        "ridgeline.kernels.verified_rows",
        "speculation/test_verify.py",
    ),
}
# One chat request (tools/trace_request.py). Meant are 70 files, 400 functions and 900 changes.
MAX_HOPS = {"files": 84, "functions": 488, "changes of file": 1_830}


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
        if path.suffix == ".py" and dotted(path) in FAMILY_FILES:
            assert num_lines(path) <= MAX_FAMILY_LINES, path
        elif path.suffix == ".py" and dotted(path).startswith(PAGES):
            assert num_lines(path) <= MAX_PAGE_LINES, path
        elif path.suffix in {".py", ".cpp", ".h", ".cu"}:
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
    files = {dotted(path) for path in modules()} - FAMILY_FILES
    files = {name for name in files if not name.startswith(PAGES)}
    print(f"\n{len(files)} files, {len(protocols)} protocols")
    assert len(files) <= MAX_FILES
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
        and dotted(path) not in FAMILY_FILES
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
        and not (part.lower() == "guess" and dotted(path).startswith("ridgeline.lab."))  # readers'
    }
    assert not found, f"say it in the field's words: {found}"


def test_what_is_computed_twice_is_held_equal() -> None:
    names = {dotted(path) for path in modules()}
    fast = {n for n in names if n.startswith("ridgeline.kernels.") and n.endswith(TWIN_ENDS)}
    assert fast <= TWINS.keys(), f"no line in TWINS: {fast - TWINS.keys()}"
    for twin, (first, test) in TWINS.items():
        assert twin in names
        end = next((end for end in TWIN_ENDS if twin.endswith(end)), "")
        first = first or twin.removesuffix(end)
        assert first in names
        text = (PACKAGE.parent / "tests" / test).read_text("utf-8")
        assert any(name.rsplit(".", 1)[1] in text for name in (twin, first)), f"{test}: not {twin}"


def test_the_way_of_a_chat_request() -> None:
    root = PACKAGE.parent
    command = [sys.executable, "-m", "tools.trace_request"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # a GPU's way is another
    run = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    told = run.stdout
    print(told)
    hops = {what: int(re.findall(rf"(\d+) {what}", told)[0]) for what in MAX_HOPS}
    over = {what: num for what, num in hops.items() if num > MAX_HOPS[what]}
    assert not over, f"more than MAX_HOPS: {over}"


def test_the_glossary_has_few_words_and_they_are_used() -> None:
    nouns = re.findall(r"\*\*([^*]+)\*\*", (PACKAGE.parent / "docs/glossary.md").read_text("utf-8"))
    print(f"\n{len(nouns)} nouns")
    assert len(nouns) == len(set(nouns)) <= 60
    paths = [*modules(), *(PACKAGE.parent / "tests").rglob("*.py")]
    text = " ".join(path.read_text("utf-8").lower() for path in paths)
    plain = re.sub(r"[\s_#-]+", " ", text)
    unused = [n for n in nouns if n.lower().replace("-", " ").removesuffix("s") not in plain]
    assert not unused, f"nobody says {unused}"
