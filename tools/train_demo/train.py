r"""Train the models in the box from nothing but a seed.

    python -m tools.train_demo.train --what pair --out FIRST --steps 10500 --reuse 1
    python -m tools.train_demo.train --what moe  --out FIRST --steps 3200 --reuse 1
    python -m tools.train_demo.train --what pair --out DIR --steps 2000 --reuse 1 \
        --begin FIRST --first-shard 10500 --rate 0.3
    python -m tools.train_demo.train --what moe --out DIR --steps 800 --reuse 1 \
        --begin FIRST --first-shard 10500 --rate 0.3

`pair` trains the chat model and, from its logits on the same batches, the draft (KL distillation);
`moe` trains the expert model on the same data. The later two go on from what the first two have
exported, with lessons that were not among the first and a smaller rate. Data is made by worker
processes while the GPU trains. With --stop-after a run saves everything (optimizer state included,
as safetensors) and ends; the same command goes on from there. Logs are JSON lines in
DIR/log-WHAT.jsonl.

With one version of torch on one kind of device the same seed gives the same weights bit for bit,
wherever a run is stopped and continued.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional

from tools import worlds
from tools.train_demo import model as models
from tools.train_demo.shards import LEARN, LENGTH, SEQUENCES, wait_for
from tools.train_demo.tokenizer import (
    ASSISTANT,
    BEGIN,
    END,
    ROLE_IDS,
    save_tokenizer,
    train_tokenizer,
)

NAMES = {"pair": ("chat", "draft"), "moe": ("moe",)}
PEAK_RATE = {"chat": 2e-3, "draft": 4e-3, "moe": 4e-3}
WARMUP = 200
DECAY_SHARE = 0.45  # the last part of the steps, in which the rate falls to zero
BALANCE = 0.01
CHECK_TASKS = ("arithmetic", "lookup", "records", "copy", "sort", "json")
CHECK_PROBLEMS = 128
MAX_SHARD_BYTES = 12 << 20  # of exported weights


class Trained:
    """One model with its optimizer and learning rate."""

    def __init__(
        self,
        name: str,
        steps: int,
        device: torch.device,
        rate: float = 1.0,
        begin: Path | None = None,
    ) -> None:
        """`rate` times the usual one; `begin`: a folder whose weights are gone on from."""
        self.name = name
        self.steps = steps
        self.decoder = models.Decoder(models.SHAPES[name]).to(device)
        if begin is not None:
            tensors: dict[str, torch.Tensor] = {}
            for file in sorted((begin / name).glob("*.safetensors")):
                tensors |= load_file(str(file))
            self.decoder.begin_with(tensors)
        self.peak_rate = rate * PEAK_RATE[name]
        matrices = [p for p in self.decoder.parameters() if p.dim() > 1]
        vectors = [p for p in self.decoder.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.peak_rate,
            betas=(0.9, 0.95),
            fused=device.type == "cuda",
        )
        self._rotary = models.rotary(models.SHAPES[name], device)
        self._run: Any = self.decoder
        if device.type == "cuda":
            # Otherwise the order of its sums is chosen by timing candidates, anew in each process.
            self._run = torch.compile(self.decoder, options={"deterministic": True})

    def logits(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the decoder returns, by its compiled form where there is one."""
        logits, uneven = self._run(ids, *self._rotary)
        return logits, uneven

    def update(self, step: int) -> float:
        """Clip, step and clear; the rate that was used."""
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        left = (self.steps - step) / max(1, int(DECAY_SHARE * self.steps))
        rate = self.peak_rate * min(1.0, (step + 1) / WARMUP, max(left, 0.0))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return rate

    def save(self, path: Path, step: int) -> None:
        tensors = {f"model.{n}": p.detach() for n, p in self.decoder.named_parameters()}
        for index, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimizer.{index}.{key}"] = value
        temporary = path.with_suffix(".tmp")
        save_file(
            {n: t.contiguous() for n, t in tensors.items()}, str(temporary), {"step": str(step)}
        )
        temporary.rename(path)

    def load(self, path: Path) -> None:
        tensors = load_file(str(path), device=str(next(self.decoder.parameters()).device))
        with torch.no_grad():
            for name, parameter in self.decoder.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        whole = self.optimizer.state_dict()
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                # The count of steps stays where the optimizer keeps it.
                whole["state"].setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict(whole)

    def export(self, folder: Path) -> None:
        """The model as Transformers reads it: bfloat16, shards of a few MB."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(models.config(self.name), indent=1) + "\n")
        generation = {"bos_token_id": BEGIN, "eos_token_id": END, "do_sample": False}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
        shards: list[dict[str, torch.Tensor]] = [{}]
        size = 0
        for name, tensor in self.decoder.tensors():
            tensor = tensor.to(torch.bfloat16).cpu().contiguous()
            if size + tensor.nbytes > MAX_SHARD_BYTES:
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
        if len(shards) == 1:
            save_file(shards[0], str(folder / "model.safetensors"), {"format": "pt"})
            return
        where: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, str(folder / file), {"format": "pt"})
            where |= dict.fromkeys(shard, file)
        total = sum(t.nbytes for shard in shards for t in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


Workers = list[subprocess.Popen[bytes]]


def batches(
    folder: Path, first: int, last: int, reuse: int, workers: Workers, first_shard: int = 0
) -> Iterator[tuple[int, torch.Tensor]]:
    """(step, [sequences, length + 1]) of steps first .. last; step 0 has shard `first_shard`, each
    shard is used `reuse` times, the second time 64 shards later. Ends the run when a worker has
    failed."""

    def check() -> None:
        if any(worker.poll() for worker in workers):
            raise SystemExit("a worker that makes the data has failed; its error stands above")

    for step in range(first, last):
        group, place = divmod(step, 64 * reuse)
        shard = wait_for(folder, first_shard + group * 64 + place % 64, check)
        yield step, torch.from_numpy(shard.astype("int32"))


def token_weights(learn: torch.Tensor) -> torch.Tensor:
    """[B, T] of bool -> [B, T]: a token to learn from weighs one over the root of the length of
    its answer. Counted alike, the tokens of stories would be 85 % of all, and those of sums and
    look-ups, which are harder, 1 % each."""
    before = torch.nn.functional.pad(learn[:, :-1], (1, 0))
    segment = (learn & ~before).flatten().cumsum(0)  # of each token the number of its answer
    lengths = torch.zeros(learn.numel() + 1, device=learn.device)
    lengths.index_add_(0, segment, learn.flatten().float())
    root = lengths[segment].clamp(min=1.0).rsqrt().view(learn.shape)
    return root * learn


def losses(
    parts: dict[str, Trained], ids: torch.Tensor, learn: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Cross entropy of the first model (with a small price on experts' uneven use); the draft
    learns the chat model's distribution."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    weights = token_weights(learn[:, 1:])
    total = weights.sum()
    found: dict[str, torch.Tensor] = {}
    teacher = None
    for name, part in parts.items():
        logits, uneven = part.logits(inputs)
        logits = logits.float()
        if teacher is None:
            nll = functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="none"
            )
            found[name] = (nll * weights.flatten()).sum() / total + BALANCE * uneven
            teacher = logits.detach().log_softmax(-1)
        else:
            own = logits.log_softmax(-1)
            divergence = (teacher.exp() * (teacher - own)).sum(-1)
            found[name] = (divergence * weights).sum() / total
    return found


def check_batch(
    tokenizer: Tokenizer, task: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Held-out problems with their answers, padded, and where the answers are."""
    rng = random.Random(f"check/{task}")
    rows: list[tuple[list[int], int]] = []
    while len(rows) < CHECK_PROBLEMS:
        problem = worlds.problem(task, rng, "test")
        ids = [BEGIN]
        for message in problem.messages:
            text = tokenizer.encode(message.content, add_special_tokens=False).ids
            ids += [ROLE_IDS[message.role], *text, END]
        answer = [*tokenizer.encode(problem.answer, add_special_tokens=False).ids, END]
        ids.append(ASSISTANT)
        if len(ids) + len(answer) <= LENGTH:
            rows.append((ids + answer, len(answer)))
    length = max(len(ids) for ids, _ in rows)
    length += -length % 256
    ids_BT = torch.zeros(len(rows), length, dtype=torch.int64)
    answers_BT = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, (ids, count) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        answers_BT[row, len(ids) - count : len(ids)] = True
    return ids_BT.to(device), answers_BT.to(device)


@torch.no_grad()
def exact_match(part: Trained, ids: torch.Tensor, answers: torch.Tensor) -> float:
    """Share of problems whose whole answer is the model's greedy choice, token by token."""
    right = []
    cos, sin = models.rotary(part.decoder.shape, ids.device)
    for rows, where in zip(torch.split(ids, 16), torch.split(answers, 16), strict=True):
        best = part.decoder(rows, cos, sin)[0][:, :-1].argmax(-1)
        right.append(((best == rows[:, 1:]) | ~where[:, 1:]).all(1))
    return torch.cat(right).float().mean().item()


def start_workers(args: argparse.Namespace, tokenizer: Path) -> Workers:
    shards = math.ceil(args.steps / args.reuse / 64) * 64
    base = [sys.executable, "-m", "tools.train_demo.shards", "--folder", str(args.shards)]
    base += ["--tokenizer", str(tokenizer), "--seed", str(args.seed), "--shards", str(shards)]
    base += ["--first", str(args.first_shard)]
    for book in args.book:
        base += ["--book", str(book)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return [
        subprocess.Popen(
            [*base, "--worker", str(i), "--workers", str(args.workers)], env=environment
        )
        for i in range(args.workers)
    ]


def get_tokenizer(args: argparse.Namespace) -> Tokenizer:
    path = args.out / "tokenizer"
    if args.begin is not None:
        names = ("tokenizer.json", "tokenizer_config.json")
        path.mkdir(exist_ok=True)
        for name in names:
            shutil.copyfile(args.begin / NAMES[args.what][0] / name, path / name)
    elif not (path / "tokenizer.json").exists():
        books = [book.read_text() for book in args.book]
        save_tokenizer(train_tokenizer(args.seed, books), path)
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def make_reproducible(seed: int) -> None:
    """Every sum in the same order each time, for whoever trains again from this seed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(seed)


def run(args: argparse.Namespace) -> bool:
    """True when the last step is done; False when the time was over before."""
    make_reproducible(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.shards.mkdir(parents=True, exist_ok=True)
    tokenizer = get_tokenizer(args)
    workers = start_workers(args, args.out / "tokenizer" / "tokenizer.json") if args.workers else []
    names = NAMES[args.what]
    parts = {name: Trained(name, args.steps, device, args.rate, args.begin) for name in names}
    done = 0
    note = args.out / f"checkpoint-{args.what}.json"
    if note.exists():
        done = json.loads(note.read_text())["step"]
        for name, part in parts.items():
            part.load(args.out / f"checkpoint-{name}.safetensors")
    checks = {task: check_batch(tokenizer, task, device) for task in CHECK_TASKS}
    try:
        done = _train(args, parts, checks, done, device, workers)
    finally:
        for worker in workers:
            worker.terminate()
    for name, part in parts.items():
        part.save(args.out / f"checkpoint-{name}.safetensors", done)
    note.write_text(json.dumps({"step": done}))
    # Exported at every stop, so that whoever loses the machine keeps the weights so far.
    for name, part in parts.items():
        part.export(args.out / name)
        save_tokenizer(tokenizer, args.out / name)
    return bool(done == args.steps)


def _train(
    args: argparse.Namespace,
    parts: dict[str, Trained],
    checks: dict[str, tuple[torch.Tensor, torch.Tensor]],
    done: int,
    device: torch.device,
    workers: Workers,
) -> int:
    start, log = time.monotonic(), (args.out / f"log-{args.what}.jsonl").open("a")
    marked, marked_at = done, start
    for step, shard in batches(
        args.shards, done, args.steps, args.reuse, workers, args.first_shard
    ):
        raw = shard.to(device, non_blocking=True).long()
        ids, learn = raw & (LEARN - 1), raw >= LEARN
        with torch.autocast(device.type, torch.bfloat16):
            found = losses(parts, ids, learn)
        torch.stack(list(found.values())).sum().backward()  # type: ignore[no-untyped-call]
        rates = [part.update(step) for part in parts.values()]
        done = step + 1
        now = time.monotonic()
        if done % args.log_every == 0 or done == args.steps:
            record: dict[str, Any] = {name: round(x.item(), 4) for name, x in found.items()}
            now = time.monotonic()
            speed = (done - marked) * SEQUENCES * LENGTH / (now - marked_at)
            record |= {"step": done, "rate": rates[0], "tokens_per_s": round(speed)}
            record["seconds"] = round(now - start, 1)
            if done % (5 * args.log_every) == 0 or done == args.steps:
                for name, part in parts.items():
                    with torch.autocast(device.type, torch.bfloat16):
                        record[f"{name}_exact"] = {
                            task: round(exact_match(part, *batch), 3)
                            for task, batch in checks.items()
                        }
            marked, marked_at = done, time.monotonic()
            print(json.dumps(record), flush=True)
            print(json.dumps(record), file=log, flush=True)
        if args.stop_after and now - start > args.stop_after:
            break
    log.close()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=NAMES, default="pair")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=Path, help="folder of the data (default OUT/shards)")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--reuse", type=int, default=2, help="times that each shard is used")
    parser.add_argument("--begin", type=Path, help="folder of a training to go on from")
    parser.add_argument("--first-shard", type=int, default=0, help="the data of the first step")
    parser.add_argument("--rate", type=float, default=1.0, help="times the usual learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--book", type=Path, action="append", default=[])
    parser.add_argument("--stop-after", type=float, help="seconds; the next run goes on")
    parser.add_argument("--log-every", type=int, default=50)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.shards = args.shards or args.out / "shards"
    raise SystemExit(0 if run(args) else 3)


if __name__ == "__main__":
    main()
