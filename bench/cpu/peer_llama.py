"""What does llama.cpp do with the CPU workloads? For a Python that has llama-cpp-python.

    python bench/cpu/peer_llama.py --gguf MODEL.gguf --prefill 512,2048 --decode 1,8 --new 32

Prints one JSON object, as `run.py` does for Ridgeline. `--quantize q8_0 --to FILE` makes that file
of the model and ends. `--turns` answers lines such as "prefill 512", "decode 16" (tokens of one
sequence) and "decode8 16" (of each of 8) by the seconds they took, of a clock and of processors.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import sys
import time

import llama_cpp as lc
import numpy as np

CONTEXT = 128  # prompt tokens before a decode
SILENT = lc.llama_log_callback(lambda *_: None)  # kept: the library calls it later
KINDS = {"q8_0": lc.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": lc.LLAMA_FTYPE_MOSTLY_Q4_0}


def quantize(source: str, kind: str, to: str, threads: int) -> None:
    params = lc.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, KINDS[kind]
    if lc.llama_model_quantize(source.encode(), to.encode(), ctypes.byref(params)):
        raise SystemExit(f"cannot quantize {source}")


class Engine:
    def __init__(self, path: str, threads: int, sequences: int, tokens: int) -> None:
        params = lc.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = lc.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise SystemExit(f"cannot load {path}")
        context = lc.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = tokens, 2048, 512
        context.n_threads = context.n_threads_batch = threads
        context.n_seq_max, context.kv_unified = sequences, True
        self.context = lc.llama_init_from_model(self.model, context)
        self.vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        self.batch = lc.llama_batch_init(2048, 0, 1)

    def clear(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, wants logits) of each row."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = wanted
        if lc.llama_decode(self.context, self.batch):
            raise SystemExit("llama_decode failed")

    def best(self, row: int) -> int:
        logits = lc.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())

    def prefill(self, ids: list[int], sequence: int = 0) -> int:
        last = len(ids) - 1
        self.run([(token, i, sequence, i == last) for i, token in enumerate(ids)])
        return self.best(last)

    def decode_s(self, batch: int, new: int) -> tuple[float, float]:
        """Seconds, and those of processors, of `new` tokens of each sequence, behind its prompt."""
        self.clear()
        ids = [self.prefill(prompt(CONTEXT, self.vocab, s), s) for s in range(batch)]
        began = time.perf_counter(), time.process_time()
        for step in range(new):
            self.run([(token, CONTEXT + step, s, True) for s, token in enumerate(ids)])
            ids = [self.best(s) for s in range(batch)]
        return time.perf_counter() - began[0], time.process_time() - began[1]

    def prefill_s(self, count: int) -> tuple[float, float]:
        self.clear()
        ids = prompt(count, self.vocab, count)
        began = time.perf_counter(), time.process_time()
        self.prefill(ids)
        return time.perf_counter() - began[0], time.process_time() - began[1]


def take_turns(engine: Engine) -> None:
    for line in sys.stdin:
        what, count = line.split()
        if what == "prefill":
            taken = engine.prefill_s(int(count))
        else:
            taken = engine.decode_s(8 if what == "decode8" else 1, int(count))
        print(*taken, flush=True)


def prompt(count: int, vocab: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(300, vocab, count).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--quantize", choices=KINDS)
    parser.add_argument("--to")
    parser.add_argument("--prefill", default="512,2048")
    parser.add_argument("--decode", default="1,8")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", action="store_true")
    args = parser.parse_args()
    lc.llama_log_set(SILENT, None)
    lc.llama_backend_init()
    if args.quantize:
        quantize(args.gguf, args.quantize, args.to, args.threads)
        return
    begin = time.perf_counter()
    engine = Engine(args.gguf, args.threads, 8, 8 * (CONTEXT + 512) + 2048)
    found: dict[str, float] = {"load_s": time.perf_counter() - begin}
    engine.prefill(prompt(16, engine.vocab, 0))
    if args.turns:
        take_turns(engine)
        return
    for count in map(int, args.prefill.split(",")):
        found[f"prefill {count}"] = count / engine.prefill_s(count)[0]
    for batch in map(int, args.decode.split(",")):
        found[f"decode b{batch}"] = batch * args.new / engine.decode_s(batch, args.new)[0]
    found["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
