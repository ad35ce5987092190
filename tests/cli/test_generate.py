"""Does `ridgeline generate` print the model's answer, and only that, to standard output?"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline import LLM
from ridgeline.kernels.cpu import native
from tests.cli.conftest import Cli

TIME = r"[0-9.,]+ (s|ms|us)"
ANSWER_LINE = rf"\[\d+ tokens, first token after {TIME}, then [0-9.,]+ tok/s, ended by length\]"
RANDOM = ("--load-format", "random", "--num-blocks", "200")


def lines(err: str) -> list[str]:
    """Without those that a machine without the native kernels, or one whose steps of so small a
    model are not captured, has besides."""
    return [x for x in err.splitlines() if native.MISSING not in x and " WARNING " not in x]


def test_the_reference_text_through_the_shell(shared: Path) -> None:
    """What llama2.c requires of this checkpoint: 464 characters, greedy from the start token."""
    folder = shared / "models" / "stories260K"
    wanted = json.loads((folder / "expected.json").read_text())["llama2c_own_expectation"]["text"]
    argv = ["generate", str(folder), "--token-ids", "1", "--max-tokens", "200", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline.cli.main", *argv, "--dtype", "float32"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert len(wanted) == 464
    assert done.stdout.strip() == wanted
    assert done.stdout.endswith("\n")
    start, after = lines(done.stderr)
    assert start.startswith("stories260K: llama, 260 K parameters, float32 on cpu")
    assert re.fullmatch(ANSWER_LINE, after)
    assert len(after) < 80


def test_one_line_after_an_answer_and_the_rest_with_stats(plain: Path, cli: Cli) -> None:
    argv = ("generate", plain, *RANDOM, "-p", "hello", "--max-tokens", 12, "--ignore-eos")
    _, _, err = cli(*argv)
    _, after = lines(err)
    assert re.fullmatch(ANSWER_LINE, after)
    _, _, err = cli(*argv, "--stats")
    _, after, *rest = lines(err)
    assert re.fullmatch(ANSWER_LINE, after)
    said = {line.split()[0]: line for line in rest}
    assert list(said)[:4] == ["prompt", "queue", "steps", "time"]
    assert said["steps"].endswith("12 (11 decode, 1 prompt)")
    assert said["time"].endswith("in steps, not calibrated: ridgeline calibrate")
    assert all(len(line) < 80 for line in rest)
    _, _, err = cli(*argv, "--stats", "-q")
    assert err == ""
    _, _, err = cli(*argv, "-p", "other")
    assert re.search(r"^\[2 answers, 24 tokens, .* tok/s in all, ended by length\]$", err, re.M)


def test_streamed_and_batched_text_are_the_same(plain: Path, cli: Cli) -> None:
    argv = ("generate", plain, *RANDOM, "-p", "hello", "--max-tokens", 12, "--ignore-eos")
    seeded = (*argv, "--seed", 5)
    code, streamed, _ = cli(*seeded)
    _, batched, _ = cli(*seeded, "--json")
    record = json.loads(batched)
    [output] = record["results"][0]["outputs"]
    assert (code, streamed) == (0, output["text"] + "\n")
    assert len(output["token_ids"]) == 12
    assert record["results"][0]["prompt"] == "hello"
    start = record["start"]
    assert start["total_s"] == pytest.approx(sum(phase["seconds"] for phase in start["phases"]))
    assert {"name": "weights", "detail": "random"}.items() <= next(
        phase for phase in start["phases"] if phase["name"] == "weights"
    ).items()
    assert record["results"][0]["metrics"]["ttft_s"] > 0


def test_the_seed_decides(plain: Path, cli: Cli) -> None:
    argv = ("generate", plain, *RANDOM, "-p", "x", "--max-tokens", 16, "--ignore-eos", "--seed")
    answers = [cli(*argv, seed)[1] for seed in (1, 1, 2)]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_several_prompts_in_one_batch_and_quiet(plain: Path, cli: Cli) -> None:
    argv = ("generate", plain, *RANDOM, "--temperature", 0, "--max-tokens", 6, "--ignore-eos")
    alone = [cli(*argv, "-p", text)[1] for text in ("one", "two")]
    code, out, err = cli(*argv, "-p", "one", "-p", "two", "-q")
    assert (code, out, err) == (0, "".join(alone), "")
    _, _, err = cli(*argv, "-p", "one", "-p", "two")
    assert "--- prompt 1" in err


def test_a_model_without_tokenizer_answers_in_token_ids(bare: Path, cli: Cli) -> None:
    argv = ("generate", bare, *RANDOM, "--token-ids", "1,2,3", "--max-tokens", 5, "--ignore-eos")
    _, streamed, _ = cli(*argv, "--seed", 1)
    _, batched, _ = cli(*argv, "--seed", 1, "--json")
    [output] = json.loads(batched)["results"][0]["outputs"]
    assert [int(word) for word in streamed.split()] == output["token_ids"]
    code, out, err = cli("generate", bare, *RANDOM, "-p", "text")
    assert (code, out) == (2, "")
    assert "no tokenizer" in err.splitlines()[-1]


def test_a_tokenizer_that_is_not_there(plain: Path, cli: Cli) -> None:
    code, out, err = cli("generate", plain, *RANDOM, "-p", "text", "--tokenizer", "/nowhere")
    assert (code, out) == (2, "")
    assert "tokenizer '/nowhere': not found" in err.splitlines()[-1]


def test_logprobs_and_samples(plain: Path, cli: Cli) -> None:
    argv = ("generate", plain, *RANDOM, "-p", "ab", "--max-tokens", 3, "--ignore-eos")
    _, out, err = cli(*argv, "--logprobs", 2, "--temperature", 0, "-q")
    rows = err.splitlines()
    assert len(rows) == 3
    assert all("rank 1 " in row for row in rows)
    _, out, _ = cli(*argv, "--n", 2, "--logprobs", 1, "--prompt-logprobs", 1, "--json")
    [result] = json.loads(out)["results"]
    assert [choice["index"] for choice in result["outputs"]] == [0, 1]
    assert len(result["prompt_logprobs"]) == len(result["prompt_token_ids"])
    assert result["prompt_logprobs"][0] is None
    for choice in result["outputs"]:
        assert len(choice["logprobs"]) == 3
        assert len(choice["logprobs"][0]["top"]) == 1


def test_beam_search(plain: Path, cli: Cli) -> None:
    argv = ("generate", plain, *RANDOM, "-p", "ab", "--max-tokens", 4, "--beam-width", 3, "--n", 2)
    code, out, _ = cli(*argv, "--json")
    outputs = json.loads(out)["results"][0]["outputs"]
    assert code == 0
    assert len(outputs) == 2
    assert outputs[0]["cumulative_logprob"] >= outputs[1]["cumulative_logprob"]


def test_the_models_own_wishes_are_the_default(shared: Path, cli: Cli) -> None:
    """generation_config.json says greedy, so two runs without flags agree."""
    argv = ("generate", shared / "models" / "stories260K", "-p", "Once", "--max-tokens", 8)
    assert cli(*argv)[1] == cli(*argv)[1]
    assert cli(*argv)[1] == cli(*argv, "--temperature", 0)[1]
    assert cli(*argv)[1] != cli(*argv, "--temperature", 5, "--seed", 1)[1]


def test_the_default_length_fits_the_context(bare: Path, cli: Cli) -> None:
    argv = ("generate", bare, *RANDOM, "--token-ids", "1,2,3", "--ignore-eos", "--json")
    _, out, _ = cli(*argv, "--max-model-len", 20)
    [output] = json.loads(out)["results"][0]["outputs"]
    assert len(output["token_ids"]) == 17
    _, out, _ = cli(*argv)
    [output] = json.loads(out)["results"][0]["outputs"]
    assert len(output["token_ids"]) == 256
    code, out, err = cli(*argv, "--max-model-len", 20, "--max-tokens", 18)
    assert (code, out) == (2, "")
    assert "ask for at most 17" in err


def test_verbose_shows_decisions_and_memory(bare: Path, cli: Cli) -> None:
    greedy = ("--max-tokens", 1, "--temperature", 0)  # a token that is drawn may be a space
    _, out, err = cli("generate", bare, *RANDOM, "--token-ids", "1", *greedy, "-v")
    assert "decided at start" in err
    assert "where the memory goes" in err
    assert len(out.split()) == 1


def test_errors_name_the_way_out(tmp_path: Path, plain: Path, cli: Cli) -> None:
    code, _, err = cli("generate", tmp_path, "-p", "x")
    assert code == 2
    assert "config.json" in err
    code, _, err = cli("generate", plain, "-p", "x")
    assert code == 2
    assert "safetensors" in err
    code, _, err = cli("generate", plain, *RANDOM, "-p", "x", "--top-p", 2)
    assert code == 2
    assert err.splitlines()[-1].startswith("ridgeline: error: --top-p must be between")


def test_ctrl_c_ends_the_answer_between_two_tokens(
    plain: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    steps = 0
    step = LLM._step

    def counted(self: LLM) -> None:
        nonlocal steps
        steps += 1
        if steps == 10:
            signal.raise_signal(signal.SIGINT)
        step(self)

    monkeypatch.setattr(LLM, "_step", counted)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = cli(
        *("generate", plain, *RANDOM, "-p", "x", "--max-tokens", 400, "--ignore-eos", "--seed", 1)
    )
    assert code == 130
    assert out.endswith("\n")
    assert "ended by abort" in err
    assert steps < 20
    assert signal.getsignal(signal.SIGINT) is before


def test_a_gguf_file_is_a_model(cli: Cli) -> None:
    """Its vocabulary, its weights, its name: everything is in the one file."""
    path = Path(__file__).parents[1] / "loader" / "gguf_files" / "llama.gguf"
    argv = ("generate", path, "--dtype", "float32", "--num-blocks", 64, "--max-tokens", 8)
    code, out, err = cli(*argv, "--temperature", 0, "-p", "he", "--ignore-eos", "--json")
    assert code == 0, err
    record = json.loads(out)
    [output] = record["results"][0]["outputs"]
    assert len(output["token_ids"]) == 8
