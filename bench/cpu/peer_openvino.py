"""What does OpenVINO do with the CPU workloads? For a Python that has openvino.

    python bench/cpu/peer_openvino.py --ir FOLDER --prefill 512,2048 --decode 1,8 --new 32

Prints one JSON object, as `run.py` does for Ridgeline. FOLDER holds `openvino_model.xml`, stateful,
as optimum-intel exports it. With optimum-intel and nncf it is made of a Hugging Face folder:

    python bench/cpu/peer_openvino.py --ir FOLDER --export A-hf --kind bf16
    python bench/cpu/peer_openvino.py --ir FOLDER --compress BF16-FOLDER --kind int8 (or int4)

int8: every matrix, a scale a row; int4: groups of 128 (32 where rows are shorter), embedding and
output matrix int8; both symmetric. Precisions of activations and cache are OpenVINO's own choice.
As its own pipelines do, logits are computed for the last token of a prompt alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

CONTEXT = 128  # prompt tokens before a decode
GROUP, SMALL_GROUP = 128, 32
FILE = "openvino_model.xml"


def export(source: Path, to: Path) -> None:
    """bfloat16 weights as they are."""
    from optimum.intel import OVModelForCausalLM

    OVModelForCausalLM.from_pretrained(
        source, export=True, load_in_8bit=False, compile=False
    ).save_pretrained(to)


def compress(source: Path, kind: str, to: Path) -> None:
    import nncf

    model = ov.Core().read_model(source / FILE)
    if kind == "int8":
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    else:
        hidden = json.loads((source / "config.json").read_text(encoding="utf-8"))["hidden_size"]
        group = GROUP if hidden % GROUP == 0 else SMALL_GROUP
        mode = nncf.CompressWeightsMode.INT4_SYM
        model = nncf.compress_weights(model, mode=mode, group_size=group, ratio=1.0)
    to.mkdir(parents=True, exist_ok=True)
    ov.save_model(model, to / FILE, compress_to_fp16=False)


def keep_last_token(model: ov.Model) -> None:
    """Put a slice before the output matrix: of [B, T, E] the last token is left."""
    node = model.output("logits").node.input_value(0).node
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).node
    last = ops.slice(node.input_value(0), [-1], [np.iinfo(np.int64).max], [1], [1])
    node.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


class Engine:
    def __init__(self, folder: Path, threads: int) -> None:
        core = ov.Core()
        model = core.read_model(folder / FILE)
        keep_last_token(model)
        config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        compiled = core.compile_model(model, "CPU", config)
        chosen = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
        self.chosen = {name: str(compiled.get_property(name)) for name in chosen}
        self.request = compiled.create_infer_request()
        self.vocab = int(model.output("logits").partial_shape[2].get_length())

    def step(self, ids_BT: np.ndarray, seen: int) -> np.ndarray:
        """The best next token of each sequence, [B, 1]; all have `seen` tokens in the cache."""
        batch, count = ids_BT.shape
        positions = np.arange(seen, seen + count, dtype=np.int64)
        inputs: dict[str, Any] = {
            "input_ids": ids_BT,
            "attention_mask": np.ones((batch, seen + count), np.int64),
            "position_ids": np.broadcast_to(positions, ids_BT.shape).copy(),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
        self.request.infer(inputs, share_inputs=True)
        return self.request.get_tensor("logits").data[:, -1:].argmax(2)

    def prefill(self, count: int, batch: int, seed: int) -> np.ndarray:
        self.request.reset_state()
        ids = np.random.default_rng(seed).integers(300, self.vocab, (batch, count))
        return self.step(ids, 0)

    def decode(self, batch: int, new: int) -> float:
        """Tokens a second of all sequences."""
        ids = self.prefill(CONTEXT, batch, new)
        begin = time.perf_counter()
        for seen in range(CONTEXT, CONTEXT + new):
            ids = self.step(ids, seen)
        return batch * new / (time.perf_counter() - begin)


def measure(args: argparse.Namespace) -> dict[str, object]:
    begin = time.perf_counter()
    engine = Engine(args.ir, args.threads)
    found: dict[str, object] = {"load_s": time.perf_counter() - begin}
    engine.prefill(16, 1, 0)
    for batch in map(int, args.decode.split(",")):
        engine.decode(batch, 4)
    for count in map(int, args.prefill.split(",")):
        engine.prefill(count, 1, 0)  # code is made for each length when it is first met
        begin = time.perf_counter()
        engine.prefill(count, 1, count)
        found[f"prefill {count}"] = count / (time.perf_counter() - begin)
    for batch in map(int, args.decode.split(",")):
        found[f"decode b{batch}"] = engine.decode(batch, args.new)
    found["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found | engine.chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ir", type=Path, required=True)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--compress", type=Path)
    parser.add_argument("--kind", choices=("bf16", "int8", "int4"), default="bf16")
    parser.add_argument("--prefill", default="512,2048")
    parser.add_argument("--decode", default="1,8")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.export:
        export(args.export, args.ir)
    elif args.compress:
        compress(args.compress, args.kind, args.ir)
    else:
        print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
