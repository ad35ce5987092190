"""Do the Triton kernels of captured steps compile for an H100, as their callers launch them?

The interpreter takes what the compiler refuses: results of branches that differ in type, names of
Python that are no constants, dtypes it has no instruction for. No GPU is needed: in a process of
its own a stand-in for the driver names the device, and each launch ends once it is compiled.
"""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.kernels.launching import HOPPER_SHARED_BYTES

ROOT = Path(__file__).parents[2]
SECONDS = 600


def test_kernels_compile() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.test_compiled"]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    compiled = set(ran.stdout.split())
    assert compiled >= EXPECTED, EXPECTED - compiled


def test_a_loop_that_is_unrolled_keeps_its_name() -> None:
    """Triton 3.6 refuses, and 3.9 takes, a branch that binds the name of such a loop anew: the name
    is a constant before the branch and a number of the device in it."""
    for path in sorted((ROOT / "ridgeline/kernels").glob("*.py")):
        for kernel in ast.walk(ast.parse(path.read_text())):
            if isinstance(kernel, ast.FunctionDef):
                assert not bound_twice(kernel), f"{path.name}: {kernel.name}"


def test_names_bound_twice_are_found() -> None:
    source = "def f():\n  for i in tl.static_range(3):\n    j = i\n  if n:\n    i, k = load(p), 1"
    assert bound_twice(ast.parse(source).body[0]) == {"i"}


def bound_twice(kernel: ast.AST) -> set[str]:
    """Names of unrolled loops of a kernel that something else binds too."""
    loops = {
        node.target
        for node in ast.walk(kernel)
        if isinstance(node, ast.For) and ast.unparse(node.iter).startswith("tl.static_range")
    }
    stored = {
        node.id
        for node in ast.walk(kernel)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in loops
    }
    return stored & {ast.unparse(name) for name in loops}


EXPECTED = {
    "_route_rows",
    "_choose_rows",
    "_sort_pairs",
    "_gate_up_row",
    "_down_row",
    "_expert_product",
    "_gather_pairs",
    "_sum_pairs",
    "_add_norm",
    "_silu_mul",
    "_small_linear",
    "_decode_kernel",
    "_write_kernel",
    "_draw_rows",
}
HALF = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def experts() -> Iterator[Callable[[], object]]:
    """Of the shapes of Qwen3-30B-A3B and Mixtral, cut as they are for each number of tokens."""
    from ridgeline.kernels import grouped_experts as grouped
    from ridgeline.kernels import grouped_experts_triton as ours
    from ridgeline.kernels.launching import make_workspace
    from ridgeline.kernels.quantize_rows import E4M3
    from ridgeline.kernels.small_linear import InputNorm

    width, room = 256, make_workspace(torch.device("cpu"))
    norm = InputNorm(empty(width), 1e-6)
    load = zeros(16, dtype=torch.int64)
    for active, inner, dtype in (
        (8, 128, HALF),
        (2, 4096, HALF),
        (8, 128, torch.float32),
        (2, 128, E4M3),
    ):
        shapes = (16, 2 * inner, width), (16, width, inner)
        is_coded = dtype == E4M3
        dtype = HALF if is_coded else dtype
        made = [empty(*shape, dtype=dtype) for shape in shapes]
        if is_coded:
            scales = [torch.ones(n, rows // 128, k // 128) for n, rows, k in shapes]
            codes = [weight.to(E4M3) for weight in made]
            gate_up, down = map(grouped.StackedMatrix, codes, scales)
        else:
            gate_up, down = map(grouped.StackedMatrix, made)
        for tokens in (1,) if is_coded else (1, 8, 40, 400, 2000):
            x, chosen = empty(tokens, width, dtype=dtype), zeros(tokens, active)
            cut = grouped.choose_cut(tokens, active, gate_up, down)
            yield partial(
                ours.grouped_experts_triton, x, empty(tokens, active, dtype=torch.float32), chosen,
                gate_up, down, cut=cut, residual_TE=x, load_X=load,
            )  # fmt: skip
    for choice in (
        grouped.Choice(128, 8),
        grouped.Choice(8, 2),
        grouped.Choice(64, 6, is_sigmoid=True, bias_X=empty(64, dtype=torch.float32)),
    ):
        router = empty(choice.experts, width)
        yield partial(ours.route_triton, empty(8, width), router, choice, norm=norm, workspace=room)
        yield partial(ours.choose_experts_triton, empty(8, choice.experts), choice)


def others() -> Iterator[Callable[[], object]]:
    """Norms, small products, latent attention and the draw of a token."""
    from ridgeline.kernels import latent_decode_triton as latent
    from ridgeline.kernels.add_norm_triton import add_norm_triton
    from ridgeline.kernels.draw_rows_triton import draw_rows_triton
    from ridgeline.kernels.latent_decode import LatentQueries
    from ridgeline.kernels.launching import make_workspace
    from ridgeline.kernels.paged_decode import DecodeBatch
    from ridgeline.kernels.silu_mul_triton import silu_mul_triton
    from ridgeline.kernels.small_linear import InputNorm
    from ridgeline.kernels.small_linear_triton import small_linear_triton
    from ridgeline.kernels.tiles import Tile

    device, x = torch.device("cpu"), empty(8, 256)
    room = make_workspace(device)
    yield partial(add_norm_triton, x, x, empty(256), 1e-6)
    yield partial(silu_mul_triton, x)
    yield partial(
        small_linear_triton, x, empty(512, 256), tile=Tile(32, 64, splits=2), gated=True,
        norm=InputNorm(empty(256), 1e-6), workspace=room,
    )  # fmt: skip
    for heads in (16, 128):
        q = empty(4, heads, 576)
        work = latent.work_of(
            device, num_heads=heads, size=512, max_requests=4, max_new=1, processors=132
        )
        batch = DecodeBatch(zeros(4, 9), zeros(4), zeros(5), 1, None, zeros(4, dtype=torch.int64))
        queries = LatentQueries(q[..., :512], q[..., 512:])
        cache = empty(9, 16, 576)
        yield partial(latent.latent_decode_triton, queries, cache, batch, 0.1, work)
        up = empty(heads, 256, 512)
        asked = empty(4, heads, 192), up[:, :128], up[:, 128:]
        yield partial(latent.latent_attend_triton, *asked, cache, batch, 0.1, work)
    places = zeros(4, dtype=torch.int64)
    angles = empty(9, 2, 64, dtype=torch.float32)
    yield partial(
        latent.write_latent_triton, empty(4, 576), q[..., 512:], empty(512), 1e-6, angles, places,
        places, cache, interleaved=True,
    )  # fmt: skip
    yield partial(draw_rows_triton, empty(4, 5000), places, None, workspace=room)


def main() -> None:
    """Prints the names of the kernels that were compiled."""
    import triton
    from triton.backends.compiler import GPUTarget

    from ridgeline.kernels import launching

    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    triton.runtime.driver.set_active(device)
    launching.launches_early = lambda device: True  # type: ignore[assignment]
    compiled: dict[str, None] = {}

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            made = kernel.run(*args, grid=grid, warmup=True, **options)
            assert made.metadata.shared <= HOPPER_SHARED_BYTES, (kernel.__name__, made.metadata)
            compiled[kernel.__name__] = None

        return run

    triton.runtime.jit.KernelInterface.__getitem__ = launch
    for call in (*experts(), *others()):
        call()
    print(*compiled)


if __name__ == "__main__":
    main()
