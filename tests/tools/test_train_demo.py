"""Does the tool that trains the bundled models stop, resume and export as it promises?

Tiny models on tiny shards; the tool itself is untouched but for its sizes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tools import worlds
from tools.train_demo import model as models
from tools.train_demo import shards, tokenizer, train

STEPS = 4
SIZES = {"SEQUENCES": 2, "LENGTH": 512}


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIZES.items():
        monkeypatch.setattr(shards, name, value)
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(train, "CHECK_TASKS", ("arithmetic",))
    monkeypatch.setattr(train, "CHECK_PROBLEMS", 4)
    monkeypatch.setattr(train, "MAX_SHARD_BYTES", 1 << 20)
    monkeypatch.setattr(tokenizer, "NUM_TEXTS", 300)
    small = {"kv_heads": 1, "feed_forward": 64, "layers": 1, "vocab": 1024}
    shapes = {
        name: replace(shape, hidden=128 if name == "chat" else 64, **small)
        for name, shape in models.SHAPES.items()
    }
    monkeypatch.setattr(models, "SHAPES", shapes)
    monkeypatch.setattr(tokenizer, "VOCAB", 1024)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with a tokenizer and all the shards that a run needs."""
    trained = tokenizer.train_tokenizer(1, ["A book. " * 40])
    tokenizer.save_tokenizer(trained, tmp_path / "tokenizer")
    (tmp_path / "shards").mkdir()
    for number in range(STEPS):
        shard = shards.make_shard(number, 1, trained, ["A book. " * 400])
        np.save(shards.shard_path(tmp_path / "shards", number), shard)
    return tmp_path


def arguments(made: Path, out: str, what: str = "pair", **changed: Any) -> argparse.Namespace:
    given = {
        "what": what, "out": made / out, "shards": made / "shards", "steps": STEPS, "reuse": 1,
        "seed": 1, "workers": 0, "book": [], "stop_after": None, "log_every": 2,
        "begin": None, "first_shard": 0, "rate": 1.0,
    }  # fmt: skip
    (made / out).mkdir(exist_ok=True)
    if not (made / out / "tokenizer").exists():
        (made / out / "tokenizer").symlink_to(made / "tokenizer")
    return argparse.Namespace(**given | changed)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(str(file))
    return found


def test_stopping_after_every_step_changes_nothing(made: Path) -> None:
    assert train.run(arguments(made, "straight"))
    ended = [train.run(arguments(made, "stopped", stop_after=1e-9)) for _ in range(STEPS)]
    assert ended == [False] * (STEPS - 1) + [True]
    for name in ("chat", "draft"):
        straight, stopped = weights(made / "straight" / name), weights(made / "stopped" / name)
        assert straight.keys() == stopped.keys()
        assert all(torch.equal(straight[key], stopped[key]) for key in straight)
    lines = (made / "straight" / "log-pair.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    assert [record["step"] for record in log] == [2, 4]
    assert log[-1]["chat_exact"].keys() == {"arithmetic"}


@pytest.mark.parametrize("what", ["pair", "moe"])
def test_a_training_goes_on_from_exported_weights(made: Path, what: str) -> None:
    """Steps so small that nothing moves export what was begun with; others do not."""
    names = train.NAMES[what]
    train.run(arguments(made, "first", what))
    begin = {"begin": made / "first", "first_shard": 1, "steps": 2}
    train.run(arguments(made, "still", what, rate=1e-9, **begin))
    train.run(arguments(made, "moved", what, rate=0.3, **begin))
    for name in names:
        first, still, moved = (weights(made / out / name) for out in ("first", "still", "moved"))
        assert first.keys() == still.keys() == moved.keys()
        assert all(torch.equal(first[key], still[key]) for key in first)
        assert not all(torch.equal(first[key], moved[key]) for key in first)
        texts = [(made / out / name / "tokenizer.json").read_text() for out in ("first", "still")]
        assert texts[0] == texts[1]
    rates = [
        json.loads((made / out / f"log-{what}.jsonl").read_text().splitlines()[0])["rate"]
        for out in ("first", "moved")
    ]
    assert rates[1] == pytest.approx(0.3 * rates[0])


def test_steps_take_their_shards_from_the_first_one_on(made: Path) -> None:
    for first, steps in ((0, 4), (2, 2)):
        found = list(train.batches(made / "shards", 0, steps, 1, [], first))
        assert [step for step, _ in found] == list(range(steps))
        for step, shard in found:
            want = np.load(shards.shard_path(made / "shards", first + step))
            assert np.array_equal(shard.numpy(), want)


@pytest.mark.parametrize("what", ["pair", "moe"])
def test_what_is_exported_is_what_was_trained(made: Path, what: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train.run(arguments(made, what, what))
    for name in ("chat", "draft") if what == "pair" else ("moe",):
        folder = made / what / name
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours = models.Decoder(models.SHAPES[name])
        state = load_file(str(made / what / f"checkpoint-{name}.safetensors"))
        rounded = {n: state[f"model.{n}"].bfloat16().float() for n, _ in ours.named_parameters()}
        ours.load_state_dict(rounded, strict=False)
        ids = torch.randint(0, 1024, (2, 40), generator=torch.Generator().manual_seed(3))
        with torch.inference_mode():
            want = theirs(ids).logits
            got = ours(ids, *models.rotary(ours.shape, ids.device))[0]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert theirs.config.num_hidden_layers == 1
        text = "Add 12 and 7, then say <hello>."
        assert AutoTokenizer.from_pretrained(folder).decode(
            AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
        ) == text  # fmt: skip


def test_a_shard_depends_on_its_number_and_seed_alone(made: Path) -> None:
    trained = Tokenizer.from_file(str(made / "tokenizer" / "tokenizer.json"))
    first, again, other = (shards.make_shard(n, 1, trained, []) for n in (7, 7, 8))
    assert first.shape == (SIZES["SEQUENCES"], SIZES["LENGTH"] + 1)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    learned = first >= shards.LEARN
    assert 0 < learned.sum() < learned.size


def test_later_shards_have_the_later_lessons(made: Path) -> None:
    trained = Tokenizer.from_file(str(made / "tokenizer" / "tokenizer.json"))
    asked = []
    for numbers in (range(8), range(shards.LATER_FROM, shards.LATER_FROM + 8)):
        found = [shards.make_shard(number, 1, trained, []) for number in numbers]
        ids = np.concatenate([shard.flatten() for shard in found]) & (shards.LEARN - 1)
        text = trained.decode(ids.tolist())
        asked.append("serial number" in text or "wrote down" in text)
    assert asked == [False, True]


@pytest.mark.parametrize("lessons", [worlds.FIRST_LESSONS, worlds.LATER_LESSONS])
def test_no_held_out_problem_is_trained_on(lessons: tuple[str, ...]) -> None:
    """Questions of the test split never occur among those for training."""
    rng = random.Random(5)
    print("seed 5")
    trained = {m.content for _ in range(3000) for m in worlds.training_conversation(rng, lessons)}
    for task in worlds.TASKS:
        if task in ("chat", "stories"):
            continue
        asked = {worlds.problem(task, rng, "test").messages[-1].content for _ in range(300)}
        assert not asked & trained, task


def test_an_answer_weighs_the_root_of_its_length() -> None:
    learn = torch.tensor([[0, 1, 1, 1, 1, 0, 1], [1, 0, 0, 1, 1, 0, 0]]).bool()
    root = 2**-0.5
    want = torch.tensor([[0, 0.5, 0.5, 0.5, 0.5, 0, 1], [1, 0, 0, root, root, 0, 0]])
    torch.testing.assert_close(train.token_weights(learn), want)


def test_a_failed_worker_ends_the_run(made: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    done.wait()
    with pytest.raises(SystemExit, match="worker"):
        next(train.batches(made / "none", 0, 1, 1, [done]))


def test_a_worker_that_writes_nothing_ends_the_run(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "PATIENCE", 0.0)
    with pytest.raises(SystemExit, match=r"shard-000000\.npy"):
        next(train.batches(made / "none", 0, 1, 1, []))
