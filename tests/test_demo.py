"""Do the bundled models answer as Transformers says, and are they what their names promise?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch

from ridgeline import LLM, ConfigError, SamplingParams, demo
from ridgeline.architectures import read_spec
from ridgeline.architectures.counts import num_parameters
from ridgeline.architectures.spec import ExpertsSpec
from ridgeline.build import build_tokenizer_side
from ridgeline.cli import main
from ridgeline.config import EngineConfig
from tests.conftest import TEST_DEVICE
from tests.tiny_model import make_tiny_model
from tools import worlds

ROOM_BYTES = 34_000_000
FEW = 20
MANY = 200
MAX_TOKENS = 64
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TOP = Path(demo.__file__).parent

amounts = pytest.mark.parametrize("num", [8, pytest.param(MANY, marks=pytest.mark.slow)])


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without weights."""
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


@pytest.fixture
def tiny(empty: Path) -> Path:
    """A package whose bundled models are tiny random ones."""
    for seed, name in enumerate(demo.NAMES):
        make_tiny_model(empty / name, seed=seed)
    return empty


# ---------------------------------------------------------------------- names, with any weights


def test_names_become_folders(tiny: Path) -> None:
    assert demo.folder() == tiny / "chat"
    for name in demo.NAMES:
        assert demo.located(f"demo:{name}") == str(demo.folder(name)) == str(tiny / name)
    for model in ("user/model", "./demo", "demo", ""):
        assert demo.located(model) == model
    with pytest.raises(ConfigError, match="demo:chat, demo:draft, demo:moe"):
        demo.located("demo:big")


def test_the_name_stays_the_name(tiny: Path) -> None:
    front = build_tokenizer_side(EngineConfig(model="demo:draft"))
    assert (front.folder.name, front.folder.path) == ("demo:draft", tiny / "draft")


def test_no_model_is_the_chat_model(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for llm in (LLM(num_blocks=50), LLM(model=None, num_blocks=50)):
        assert llm.resolved.model_path == str(tiny / "chat")
        assert llm.resolved.model_name == demo.DEFAULT
    argv = ["-p", "a", "--max-tokens", "5", "--temperature", "0", "--num-blocks", "50", "-q"]
    said = []
    for model in ([], ["demo:chat"], [str(tiny / "chat")], ["demo:moe"]):
        assert main.main(["generate", *model, *argv]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] != said[3]


# About a machine, a shell, a run; pull has no default.
WITHOUT_MODEL = {"calibrate", "completion", "explain", "lab", "pull", "route", "worker"}
NEEDED = {
    "plan": ["--input", "1", "--output", "1", "--ttft", "1s", "--tpot", "1s"],
    "quantize": ["-o", "small"],
}


@pytest.mark.parametrize("command", [c for c in main.COMMANDS if c not in WITHOUT_MODEL])
def test_model_may_be_left_out_of_every_command(command: str) -> None:
    needed = NEEDED.get(command, [])
    assert main.parse([command, *needed]).model == "demo:chat"
    assert main.parse([command, "m", *needed]).model == "m"


def test_inspect_takes_the_names(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in ([], ["demo:moe"]):
        assert main.main(["inspect", *model, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"] == (model or ["demo:chat"])[0]


def test_missing_weights_are_said_in_one_line(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["generate", "-p", "x"], ["inspect"], ["chat"], ["eval", "--num", "1"]):
        assert main.main([*argv]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert "demo:chat is not part of this installation" in err
        assert str(empty / "chat") in err
    make_tiny_model(empty / "chat", weights=False)
    with pytest.raises(ConfigError, match=r"\(model\.safetensors or "):
        demo.folder()


def test_the_room_loads_no_tensor_library() -> None:
    program = "import sys, ridgeline.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# ---------------------------------------------------------------------- the weights


@cache
def load(name: str) -> LLM:
    return LLM(f"demo:{name}", device=TEST_DEVICE, dtype="float32", max_num_seqs=32)


@cache
def reference(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(demo.folder(name), dtype=torch.float32)
    return model.to(TEST_DEVICE).eval()


@cache
def prompts(num: int) -> tuple[tuple[int, ...], ...]:
    """Held-out problems of all tasks, by the chat template."""
    rng = Random(11)
    print("seed 11")
    tasks = list(worlds.TASKS)
    made = (worlds.problem(tasks[i % len(tasks)], rng, "test") for i in range(num))
    return tuple(
        tuple(
            load("chat").encode_chat(
                [{"role": message.role, "content": message.content} for message in one.messages]
            )
        )
        for one in made
    )


def reference_answer(name: str, prompt: tuple[int, ...], ends: frozenset[int]) -> list[int]:
    """Greedy tokens by Transformers; the end token is left off, as the engine does."""
    ids = torch.tensor([prompt], device=TEST_DEVICE)
    with torch.inference_mode():
        made = reference(name).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=sorted(ends),
            pad_token_id=min(ends),
        )
    answer: list[int] = made[0, len(prompt) :].tolist()
    return answer[:-1] if answer and answer[-1] in ends else answer


@amounts
@pytest.mark.parametrize("name", demo.NAMES)
def test_greedy_answers_equal_transformers(name: str, num: int) -> None:
    llm = load(name)
    results = llm.generate(
        prompts(num), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), progress=False
    )
    for prompt, result in zip(prompts(num), results, strict=True):
        want = reference_answer(name, prompt, llm.end_token_ids)
        assert result.token_ids == want, llm.tokenizer and llm.tokenizer.decode(prompt)


@pytest.mark.parametrize("name", demo.NAMES)
def test_logits_equal_transformers(name: str) -> None:
    for prompt in prompts(FEW)[:7]:
        ids = torch.tensor([prompt], device=TEST_DEVICE)
        with torch.inference_mode():
            want = reference(name)(ids).logits[0].float().cpu()
        torch.testing.assert_close(load(name).logits(prompt), want, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", demo.NAMES)
def test_the_chat_template_equals_transformers(name: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(demo.folder(name))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 12 + 3421?"},
        {"role": "assistant", "content": "3433"},
        {"role": "user", "content": "Thank you!\nAnd sort 3, 1, 2."},
    ]
    want = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert load(name).encode_chat(messages) == list(want)
    assert load(name).encode("Once upon a time") == theirs.encode("Once upon a time")


def test_generate_answers_without_a_model() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    argv = ["generate", "-p", "Once upon a time", "--kv-cache-memory-bytes", "256MiB"]
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline.cli.main", *argv],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 10, done.stdout
    assert done.stderr.startswith("demo:chat: llama")


def test_chats_end_by_themselves() -> None:
    """The model has learned to finish: most answers end with its end token."""
    short = [p for p in prompts(FEW) if len(p) < 400]
    results = load("chat").generate(
        short, SamplingParams(temperature=0.0, max_tokens=512), progress=False
    )
    ended = sum(result.finish_reason == "stop" for result in results)
    assert ended >= 0.8 * len(short)


def test_sizes() -> None:
    files = [path for path in TOP.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < ROOM_BYTES
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".py", ".md", ".jinja"}
    for name in demo.NAMES:
        config = config_of(name)
        assert (config.get("dtype") or config.get("torch_dtype")) == "bfloat16"


def config_of(name: str) -> dict[str, Any]:
    return dict(json.loads((demo.folder(name) / "config.json").read_text()))


def test_one_tokenizer_for_all() -> None:
    for file in TOKENIZER_FILES:
        contents = {(demo.folder(name) / file).read_bytes() for name in demo.NAMES}
        assert len(contents) == 1, file


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("chat", 11e6, 13e6), ("draft", 1e6, 1.5e6), ("moe", 0, 3e6)],
)
def test_number_of_parameters(name: str, least: float, most: float) -> None:
    spec = read_spec(config_of(name))
    assert least <= num_parameters(spec) <= most
    assert num_parameters(spec) == sum(p.numel() for p in reference(name).parameters())
    assert spec.max_position_embeddings >= 2048
    assert {layer.attention.head_dim for layer in spec.layers} == {64}


def test_the_chat_model_and_the_draft_are_shaped_as_promised() -> None:
    chat, draft = read_spec(config_of("chat")), read_spec(config_of("draft"))
    assert all(layer.attention.num_kv_heads < layer.attention.num_heads for layer in chat.layers)
    assert len(draft.layers) in (1, 2)
    assert chat.vocab_size == draft.vocab_size


def test_experts_are_few_and_two_are_chosen() -> None:
    for layer in read_spec(config_of("moe")).layers:
        experts = layer.feed_forward
        assert isinstance(experts, ExpertsSpec)
        assert 4 <= experts.num_experts <= 8
        assert experts.num_active == 2


def test_every_expert_of_every_layer_is_chosen_sometimes() -> None:
    model = reference("moe")
    config = config_of("moe")
    layers, experts = config["num_hidden_layers"], config["num_local_experts"]
    chosen = torch.zeros(layers, experts, dtype=torch.int64)
    with torch.inference_mode():
        for prompt in prompts(60):
            ids = torch.tensor([prompt], device=TEST_DEVICE)
            for layer, scores in enumerate(router_scores(model, ids)):
                top = scores.float().topk(2, dim=-1).indices.cpu()
                chosen[layer] += torch.bincount(top.flatten(), minlength=experts)
    assert (chosen > 0).all(), chosen.tolist()


def router_scores(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For each layer the router's scores, [tokens, experts]."""
    out = model(ids, output_router_logits=True)
    return cast(tuple[torch.Tensor, ...], out.router_logits)


def test_the_folders_are_in_the_package_data(package_files: Callable[[str], bool]) -> None:
    for name in demo.NAMES:
        for path in sorted((TOP / name).iterdir()):
            assert package_files(f"{name}/{path.name}"), path.name


@pytest.fixture
def package_files() -> Callable[[str], bool]:
    """Whether setuptools puts a file of the room into the wheel, by pyproject.toml's patterns."""
    import tomllib
    from pathlib import PurePosixPath

    text = (TOP.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    patterns = tomllib.loads(text)["tool"]["setuptools"]["package-data"]["ridgeline.demo"]
    return lambda file: any(PurePosixPath(file).match(pattern) for pattern in patterns)
