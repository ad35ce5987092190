r"""Time decode attention where it stands: between the product of q, k and v and the product after.

    python bench/gpu/decode_chain.py [--model 8B] [--batch 32] [--context 257] [--new 5] \
        [--out lines.jsonl]

A CUDA graph of layers [qkv -> attention -> o], each with weights and a cache of its own, as in a
decode step: what counts is how much longer the chain is with attention in it, because early
launches let kernels overlap. Printed beside it: attention alone in a graph. Every way is compared
with the first one before it is timed, and with early reads it gives the same bits as without.
A split way is named by its stages, CTAs on a multiprocessor and warps. `--new`: each request has
so many new tokens, the last ones of its context, as in the check of drafts.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bench.gpu.decode_cuda import MODELS, Work, make_work, seconds
from ridgeline.kernels import paged_decode_cuda as cuda
from ridgeline.kernels.paged_decode import paged_decode
from ridgeline.kernels.paged_decode_triton import make_schedule as triton_schedule
from ridgeline.kernels.paged_decode_triton import refresh as triton_refresh
from ridgeline.kernels.qk_norm_rope_write import qk_norm_rope_write
from ridgeline.kernels.small_linear import InputNorm, small_linear

HIDDEN = {"8B": 4096, "0.6B": 1024}
LAYERS = {"8B": 6, "0.6B": 28}
MOST_FUSED_NORM = 32  # rows
REPLAYS_S = 0.02
LIMIT = 8e-3  # of the norm of an answer

WAYS: dict[str, cuda.Config | None] = {
    "ranges": cuda.Config(2, 1, 2),
    "ranges, always cut": cuda.Config(2, 1, 2, slack=0),
    "split 1x1x8": cuda.Config(1, 1, 8, split=True, whole_steps=cuda.WHOLE_STEPS),
    "split 2x1x8": cuda.Config(2, 1, 8, split=True, whole_steps=cuda.WHOLE_STEPS),
    "split 1x2x8": cuda.Config(1, 2, 8, split=True, whole_steps=cuda.WHOLE_STEPS),
    "split 2x3x4": cuda.Config(2, 3, 8, split=True, warps=4, whole_steps=cuda.WHOLE_STEPS),
    "split 3x2x4": cuda.Config(3, 2, 8, split=True, warps=4, whole_steps=cuda.WHOLE_STEPS),
    "split 1x4x4": cuda.Config(1, 4, 8, split=True, warps=4, whole_steps=cuda.WHOLE_STEPS),
    "triton pair": None,
}


@dataclass(frozen=True, slots=True)
class Chain:
    work: Work
    hidden: torch.Tensor
    norm: InputNorm | None
    idle: torch.Tensor  # in place of answers
    qkv: list[torch.Tensor]
    out: list[torch.Tensor]


def with_lengths(work: Work, block_size: int) -> Work:
    """Of an eighth of the context up to all of it."""
    most = int(work.batch.seq_lens_B[0])
    lengths = torch.linspace(most / 8, most, len(work.qkv), device="cuda").long()
    last = lengths[torch.randperm(len(lengths), device="cuda")] - 1
    blocks = work.batch.block_tables_BM.long().gather(1, (last // block_size)[:, None])[:, 0]
    return replace(
        work,
        positions=last,
        slots=blocks * block_size + last % block_size,
        batch=replace(work.batch, seq_lens_B=(last + 1).int()),
    )


def with_new(work: Work, num_new: int, block_size: int) -> Work:
    """The last tokens of each request are new."""
    batch, device = work.batch, work.qkv.device
    numbers = torch.arange(num_new, device=device)
    positions = (batch.seq_lens_B.long()[:, None] - num_new + numbers).clamp_min(0)
    blocks = batch.block_tables_BM.long().gather(1, positions // block_size)
    num = len(work.qkv)
    starts = torch.arange(num + 1, dtype=torch.int32, device=device) * num_new
    return replace(
        work,
        qkv=torch.randn(num * num_new, work.qkv.shape[1], device=device).to(work.qkv.dtype),
        positions=positions.flatten(),
        slots=(blocks * block_size + positions % block_size).flatten(),
        batch=replace(batch, query_start_B1=starts, max_new=num_new),
    )


Attend = Callable[[torch.Tensor, int], torch.Tensor]


def make_chain(
    model: str,
    num_requests: int,
    context: int,
    block_size: int,
    *,
    is_ragged: bool,
    num_new: int = 1,
) -> Chain:
    heads = MODELS[model]
    work = make_work(heads, num_requests, context, block_size, LAYERS[model])
    if is_ragged:
        work = with_lengths(work, block_size)
    if num_new > 1:
        work = with_new(work, num_new, block_size)
    rows = num_requests * num_new
    hidden, layers = HIDDEN[model], LAYERS[model]
    wide = work.qkv.shape[1]

    def weights(rows: int, columns: int) -> list[torch.Tensor]:
        like = {"device": "cuda", "dtype": torch.bfloat16}
        return [
            torch.empty(rows, columns, **like).normal_(std=columns**-0.5)  # type: ignore[call-overload]
            for _ in range(layers)
        ]

    ones = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    return Chain(
        work,
        torch.randn(rows, hidden, device="cuda").bfloat16(),
        InputNorm(ones, 1e-6) if rows <= MOST_FUSED_NORM else None,
        torch.randn(rows, heads[0] * heads[2], device="cuda").bfloat16(),
        weights(wide, hidden),
        weights(hidden, heads[0] * heads[2]),
    )


def by_cuda(work: Work, config: cuda.Config, *, early: bool) -> tuple[Attend, Callable[[], None]]:
    num_heads, kv_heads, size = work.heads
    schedule = cuda.make_schedule(
        work.qkv.device,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        block_size=work.views(work.stores[0]).k_NSKD.shape[1],
        max_requests=len(work.batch.seq_lens_B),
        num_new=work.batch.max_new,
        config=config,
    )
    prologue = cuda.Prologue(work.table_L2D, work.slots, work.norms)
    out = torch.empty((len(work.qkv), num_heads, size), dtype=work.qkv.dtype, device="cuda")

    def attend(qkv: torch.Tensor, layer: int) -> torch.Tensor:
        kv = work.views(work.stores[layer])
        ready = early and layer > 0
        cuda.decode_with_prologue(
            qkv, prologue, kv, work.batch, work.scale, schedule, out, early=ready
        )
        return out

    return attend, lambda: cuda.refresh(schedule, work.batch)


def by_triton(work: Work) -> tuple[Attend, Callable[[], None]]:
    num_heads, kv_heads, size = work.heads
    schedule = triton_schedule(
        work.qkv.device,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        max_requests=len(work.batch.seq_lens_B),
        max_new=work.batch.max_new,
    )

    def attend(qkv: torch.Tensor, layer: int) -> torch.Tensor:
        kv = work.views(work.stores[layer])
        q = qk_norm_rope_write(
            qkv, work.table_L2D, work.positions, work.slots, kv, norms=work.norms
        )
        return paged_decode(q, kv, work.batch, work.scale, schedule=schedule)

    return attend, lambda: triton_refresh(schedule, work.batch)


def run_layers(chain: Chain, attend: Attend | None) -> torch.Tensor:
    hidden = chain.hidden
    tokens, width = chain.idle.shape
    for layer, (w_qkv, w_out) in enumerate(zip(chain.qkv, chain.out, strict=True)):
        qkv = small_linear(hidden, w_qkv, norm=chain.norm)
        answer = chain.idle if attend is None else attend(qkv, layer).view(tokens, width)
        hidden = small_linear(answer, w_out)
    return hidden


def time_chain(chain: Chain, attend: Attend | None, deal: Callable[[], None] | None) -> float:
    """Seconds of one layer."""

    def once() -> None:
        if deal is not None:
            deal()
        run_layers(chain, attend)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    replays = max(3, int(REPLAYS_S * 1e3 / max(float(begin.elapsed_time(end)), 1e-3)))
    taken = []
    for _ in range(3):
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(float(begin.elapsed_time(end)) / 1e3 / replays / len(chain.qkv))
    return sorted(taken)[1]


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)).max())


def measure(model: str, chain: Chain, context: int, ways: list[str]) -> list[str]:
    work, lines = chain.work, []
    idle = time_chain(chain, None, None)
    batch, new = len(work.batch.seq_lens_B), work.batch.max_new
    shape = {"model": model, "batch": batch, "context": context, "new": new}
    named = f"{model} {batch} x {context}, {new} new"
    print(f"{named}: products alone {idle * 1e6:.2f} us", flush=True)
    want: torch.Tensor | None = None
    for way in ways:
        config = WAYS[way]
        bits: torch.Tensor | None = None
        for early in (False, True) if config else (False,):
            try:
                made = by_cuda(work, config, early=early) if config else by_triton(work)
                attend, deal = made
                deal()
                answers = [attend(work.qkv, layer).clone() for layer in (0, 1)]
                got = torch.stack(answers)
                want = got if want is None else want
                bits = got if bits is None else bits
                error = difference(got, want)
                whole = time_chain(chain, attend, deal)
                alone = seconds(work, partial(by_store, work, attend))
                again = torch.stack([attend(work.qkv, layer).clone() for layer in (0, 1)])
                same = torch.equal(bits, again)
            except Exception as fault:
                print(f"  {way} early {early}: {type(fault).__name__} {str(fault)[:200]}")
                continue
            print(
                f"  {way:18} early {int(early)}: in the chain {(whole - idle) * 1e6:7.2f} us, alone"
                f" {alone * 1e6:7.2f}, error {error:.1e}{'' if error < LIMIT and same else ' BAD'}",
                flush=True,
            )
            line = shape | {"way": way, "early": early, "chain_us": whole * 1e6}
            line |= {"idle_us": idle * 1e6, "alone_us": alone * 1e6, "error": error}
            lines.append(json.dumps(line | (asdict(config) if config else {})))
    return lines


def by_store(work: Work, attend: Attend, store: torch.Tensor) -> None:
    attend(work.qkv, next(i for i, known in enumerate(work.stores) if known is store))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--new", type=int, action="append")
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--ragged", action="store_true", help="lengths from an eighth up")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines: list[str] = []
    for model, context, num_requests, num_new in itertools.product(
        args.model or MODELS,
        args.context or (257,),
        args.batch or (1, 8, 32, 128, 256),
        args.new or (1,),
    ):
        chain = make_chain(
            model,
            num_requests,
            context,
            args.block_size,
            is_ragged=args.ragged,
            num_new=num_new,
        )
        lines += measure(model, chain, context, args.way or list(WAYS))
        if args.out:
            args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
