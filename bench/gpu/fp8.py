"""How long do the products of a decode step take with e4m3 or int8 weights, all that stands beside
them included?

    PYTHONPATH=. python3 bench/gpu/fp8.py --out DIR [--rows 1,8,32,128,256] [--bf16 | --int8]

For each number of rows: the four products of a layer of an 8B model as a decoder asks for them,
each one apart and all in turn; sum, norm, gate, residual and rounding are in. Timed by replays of a
graph over copies of the weights that together exceed the L2 cache. TB/s counts the weights.
`--bf16`: the same of plain weights; `--int8`: of int8. DIR gets fp8.jsonl, one line a measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline.distributed.placement import Placement, Shard
from ridgeline.layers.hidden import Hidden, RMSNorm
from ridgeline.layers.linear import Linear, Part
from ridgeline.quantization import WeightFormat, open_weight_format

WIDTH, INNER, QKV, LAYERS = 4096, 14336, 6144, 32
ROWS = "1,2,8,32,64,128,256"
COPIES = 16  # of a layer; of its smallest product, 16.8 MB, more than the L2 cache
REPLAYS = 20
CEILING_TB_PER_S = 4.71  # read alone, measured on this kind of card by a kernel that does no more
BFLOAT = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear


def make_linear(kind: WeightFormat, outputs: int, inputs: int) -> Linear:
    made = Linear(
        [Part("weight", None, Shard(0, outputs))],
        inputs,
        weight_format=kind,
        dtype=BFLOAT,
        device=torch.device("cuda", torch.cuda.current_device()),
        placement=Placement(),
    )
    made.parameters["weight"].normal_(0.0, inputs**-0.5)
    made.finish()
    return made


def make_layer(kind: WeightFormat) -> Layer:
    return Layer(
        make_linear(kind, QKV, WIDTH),
        make_linear(kind, WIDTH, WIDTH),
        make_linear(kind, 2 * INNER, WIDTH),
        make_linear(kind, WIDTH, INNER),
    )


class Step:
    """One step's states; `attended` stands for what attention makes."""

    def __init__(self, rows: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.norm = RMSNorm("norm", WIDTH, 1e-5, BFLOAT, device)
        self.norm.weight_E.fill_(1.0)
        self.rows = rows
        self.attended = torch.randn(rows, WIDTH, device=device, dtype=BFLOAT)
        self.inner = torch.randn(rows, 2 * INNER, device=device, dtype=BFLOAT)
        self.states = torch.randn(rows, WIDTH, device=device, dtype=BFLOAT)
        self.pending = torch.randn(rows, WIDTH, device=device, dtype=BFLOAT) * 0.01

    def before(self, adds: bool) -> Hidden:
        """As the layer before leaves them: its sum still pending where products add nothing."""
        hidden = Hidden(self.states)
        hidden.partial_TE = None if adds else self.pending
        return hidden

    def parts(self, layer: Layer) -> Iterator[tuple[str, Linear, Callable[[Layer], object]]]:
        probe = Hidden(self.states)
        layer.o.add_to(probe, self.attended)
        adds = probe.partial_TE is None
        later = layer.down.gates_input(self.states)
        inner = self.inner if later else self.inner[:, :INNER].contiguous()
        activation = None if later else "silu"
        yield "qkv", layer.qkv, lambda x: x.qkv.of_normed(self.before(adds), self.norm)
        yield "o", layer.o, lambda x: x.o.add_to(Hidden(self.states), self.attended)
        yield (
            "gate_up",
            layer.gate_up,
            lambda x: x.gate_up.of_normed(self.before(adds), self.norm, activation),
        )
        yield (
            "down",
            layer.down,
            lambda x: x.down.add_to(Hidden(self.states), inner, of_gated=later),
        )


def seconds(run: Callable[[Layer], object], layers: list[Layer]) -> float:
    """Of one call, in the mean over the copies."""

    def once() -> None:
        for layer in layers:
            run(layer)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    graph.replay()
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / REPLAYS / len(layers)


def measure(step: Step, layers: list[Layer], byte: int) -> Iterator[dict[str, Any]]:
    calls = [(name, linear, call) for name, linear, call in step.parts(layers[0])]

    def whole(layer: Layer) -> None:
        for _, _, call in calls:
            call(layer)

    for name, linear, call in calls:
        size = linear.outputs * linear.inputs * byte
        took = seconds(call, layers)
        yield {"layer": name, "rows": step.rows, "us": took * 1e6, "tb_per_s": size / took / 1e12}
    size = sum(linear.outputs * linear.inputs for _, linear, _ in calls) * byte
    took = seconds(whole, layers)
    yield {"layer": "all", "rows": step.rows, "us": took * 1e6, "tb_per_s": size / took / 1e12}


def show(row: dict[str, Any]) -> str:
    told = f"{row['format']:6}{row['layer']:8}{row['rows']:4} {row['us']:8.2f} us"
    told += f" {row['tb_per_s']:5.2f} TB/s {row['tb_per_s'] / CEILING_TB_PER_S:6.1%}"
    whole = f"  {row['us'] * LAYERS / 1e3:.2f} ms for {LAYERS} layers"
    return told + (whole if row["layer"] == "all" else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--int8", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    name = "plain" if args.bf16 else "int8" if args.int8 else "fp8"
    kind, byte = open_weight_format(name), 2 if args.bf16 else 1
    with (args.out / "fp8.jsonl").open("a", encoding="utf-8") as file, torch.inference_mode():
        layers = [make_layer(kind) for _ in range(COPIES)]
        for rows in map(int, args.rows.split(",")):
            for row in measure(Step(rows), layers, byte):
                told = row | {"format": name}
                file.write(json.dumps(told) + "\n")
                file.flush()
                print(show(told), flush=True)


if __name__ == "__main__":
    main()
