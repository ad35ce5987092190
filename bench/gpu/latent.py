"""How long does latent attention of a few tokens take, with the products before and behind it?

    PYTHONPATH=. python3 bench/gpu/latent.py [--model v2-lite] [--tokens 1,2,4,8] [--context 256]

Microseconds of a layer, by replays of a graph of layers that each have weights and a cache of their
own: "library", whose products are `torch.bmm`, and "ours", with kernels that absorb queries and
merge values. The largest difference is that of one answer. MOST_ATTENDED of
`kernels/latent_decode.py` is the most tokens for which "ours" is the faster one.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial

import torch

from ridgeline.kernels import latent_decode
from ridgeline.kernels.latent_decode import latent_attend
from ridgeline.kernels.latent_decode_triton import make_work
from ridgeline.kernels.paged_decode import DecodeBatch

HEADS = {"v2-lite": 16, "v3": 128}
SIZE, ROTATED, PLAIN, WIDTH, BLOCK = 512, 64, 128, 128, 16
SCALE = (PLAIN + ROTATED) ** -0.5
LAYERS, REPLAYS = 26, 40
WAYS = {"library": 0, "ours": 1 << 10}  # the most tokens


def microseconds(layers: list[partial[torch.Tensor]]) -> float:
    """Of one of them."""
    for layer in layers:
        layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    for _ in range(3):
        graph.replay()
    marks[0].record()
    for _ in range(REPLAYS):
        graph.replay()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) * 1e3 / REPLAYS / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=HEADS, default="v2-lite")
    parser.add_argument("--tokens", default="1,2,4,8")
    parser.add_argument("--context", default="256,4096")
    args = parser.parse_args()
    heads, device = HEADS[args.model], torch.device("cuda")
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    ups = [make(heads, PLAIN + WIDTH, SIZE) * SIZE**-0.5 for _ in range(LAYERS)]
    print("| tokens | context | library us | ours us | largest difference |\n|---|---|---|---|---|")
    sizes = (map(int, given.split(",")) for given in (args.tokens, args.context))
    for tokens, context in itertools.product(*sizes):
        blocks = tokens * -(-context // BLOCK)
        caches = [make(blocks + 1, BLOCK, SIZE + ROTATED) for _ in range(LAYERS)]
        tables = (torch.randperm(blocks, device=device) + 1).int().view(tokens, -1)
        lengths = torch.full((tokens,), context, dtype=torch.int32, device=device)
        starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        batch = DecodeBatch(tables, lengths, starts, 1, None)
        work = make_work(device, num_heads=heads, size=SIZE, max_requests=tokens, max_new=1)
        q = make(tokens, heads, PLAIN + ROTATED)

        layers = [
            partial(latent_attend, q, up[:, :PLAIN], up[:, PLAIN:], cache, batch, SCALE, work=work)
            for up, cache in zip(ups, caches, strict=True)
        ]
        found, times = [], []
        for most in WAYS.values():
            latent_decode.MOST_ATTENDED = most
            found.append(layers[0]().float())
            times.append(microseconds(layers))
        worst = (found[0] - found[1]).abs().max().item()
        print(
            f"| {tokens} | {context} | {times[0]:.1f} | {times[1]:.1f} | {worst:.1e} |", flush=True
        )


if __name__ == "__main__":
    main()
