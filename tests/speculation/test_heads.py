"""Do draft heads change nothing but the time an answer takes, through the whole engine, and do they
draft what plain PyTorch says?

Random heads are hardly ever right; one that says what the target says is made of a target whose
layers add nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.draft_counts import Counts
from ridgeline import LLM, ConfigError, SamplingParams
from ridgeline.executor.local import LocalExecutor
from ridgeline.speculation.contract import DraftStep
from ridgeline.speculation.heads import HeadDrafts
from tests.captures import captures
from tests.conftest import TEST_DEVICE
from tests.layers.driving import Driver
from tests.speculation import test_eagle3 as eagle3
from tests.speculation import test_mtp as mtp
from tests.speculation.head_reference import random_tensors
from tests.speculation.scene import VOCAB
from tests.tiny_model import make_tiny_model

PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 79, 32], [2, 71, 82, 81, 8], [5, 5, 5, 5, 5, 5, 5, 9]]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, seed=7, max_tokens=20, ignore_eos=True),
}
DRAFTS = 3


def target_folder(folder: Path, kind: str) -> Path:
    """A tiny target; that of MTP has a module of its own."""
    shape: dict[str, Any] = {"hidden_size": 32, "head_dim": 16, "vocab_size": VOCAB}
    if kind == "eagle3":
        return make_tiny_model(folder, tokenizer=False, num_hidden_layers=6, **shape)
    make_tiny_model(folder, tokenizer=False, num_nextn_predict_layers=1, **shape)
    (stored,) = folder.glob("*.safetensors")
    layout = mtp.BY_NAME[kind]
    module = random_tensors(mtp.names_of(layout, 2, has_bias=False), 5)
    save_file(load_file(stored) | module, stored)
    return folder


def head_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(eagle3.CONFIG))
    save_file(eagle3.tensors(), folder / "model.safetensors")
    return folder


def opened(folder: Path, speculate: str, **changes: Any) -> LLM:
    return LLM(
        str(folder), device=TEST_DEVICE, dtype="float32", speculate=speculate, num_blocks=60,
        block_size=4, max_model_len=64, max_num_seqs=8, warm_up="off", **changes,
    )  # fmt: skip


def asked(tmp_path: Path, kind: str) -> str:
    return f"eagle3:{head_folder(tmp_path / 'head')}" if kind == "eagle3" else "mtp"


KINDS = pytest.mark.parametrize("kind", ["eagle3", *mtp.BY_NAME])


@captures
@KINDS
def test_answers_are_those_without_drafts(kind: str, tmp_path: Path) -> None:
    """In chunks of prompts, in a batch, and again from cached prompts."""
    folder, method = target_folder(tmp_path / "model", kind), asked(tmp_path, kind)
    plain = opened(folder, "off", max_num_batched_tokens=8)
    drafted = opened(folder, f"{method}:{DRAFTS}", max_num_batched_tokens=8)
    counts = Counts()
    drafted.engine.listeners.append(counts)
    for _ in range(2):
        for sampling in SAMPLINGS.values():
            wanted = [r.token_ids for r in plain.generate(PROMPTS, sampling, progress=False)]
            found = [r.token_ids for r in drafted.generate(PROMPTS, sampling, progress=False)]
            assert found == wanted
    figures = counts.figures()
    assert figures["drafts_per_step"] > 1
    assert counts.tried[0] > 100, "accepted and rejected drafts are counted"
    assert all(right <= tried for right, tried in zip(counts.right, counts.tried, strict=True))


class Spy:
    """What a head drafted, and from which tokens of a row."""

    def __init__(self, llm: LLM) -> None:
        executor = llm.engine.executor
        assert isinstance(executor, LocalExecutor)
        assert executor.drafter is not None
        self.method = executor.drafter.method
        self.decoder = executor.drafter.graphs._decoder
        assert isinstance(self.method, HeadDrafts)
        self._draft, self.seen = self.method.draft, list[tuple[list[int], list[int]]]()
        self.logits: list[torch.Tensor] = []
        self.method.draft = self.draft  # type: ignore[method-assign]

    def draft(self, step: DraftStep, num_draft_tokens: int) -> torch.Tensor | None:
        made = self._draft(step, num_draft_tokens)
        tokens_NL = step.history.tokens_NL
        for place, row in enumerate(step.rows_B.tolist()):
            if row:  # else it is padding
                num = int(step.history.lens_N[row])
                known = tokens_NL[row, : num + num_draft_tokens].tolist()
                self.seen.append((known[:num], known[num:]))
                assert isinstance(self.method, HeadDrafts)
                self.logits.append(self.method._logits[place].clone())
        return made


def drafts_by_the_formulas(
    spy: Spy, kind: str, tokens: list[int], folder: Path
) -> tuple[torch.Tensor, list[int]]:
    """Logits of the first draft token, and the greedy drafts, by plain PyTorch over all of a row;
    only the target's states are those of the decoder."""
    target = spy.decoder
    driver = Driver(target, block_size=4, num_blocks=32)
    taps = spy.method.taps
    shape = len(taps), len(tokens) - 1, target.spec.hidden_size
    tapped = torch.empty(shape, dtype=target.dtype, device=target.device)
    target.forward_tapped(driver.batch({"r": tokens[:-1]}), driver.kv, taps, tapped)
    stored = load_file(next(folder.glob("*.safetensors")))
    if kind == "eagle3":
        embedding = stored["model.embed_tokens.weight"]
        logits, drafts = eagle3.reference(
            eagle3.tensors(), embedding, torch.cat(list(tapped), -1).cpu(), tokens[1:],
            num_draft_tokens=DRAFTS, is_normed=False,
        )  # fmt: skip
        whole = torch.full((len(embedding),), -torch.inf)
        return whole.index_copy(0, eagle3.known_ids(), logits[-1]), drafts
    assert isinstance(spy.method, HeadDrafts)
    rig = mtp.Rig.__new__(mtp.Rig)
    rig.target, rig.head = target, spy.method.head  # type: ignore[assignment]
    rig.spec = rig.head.spec
    logits, drafts = mtp.reference(rig, stored, tapped[0].cpu(), tokens[1:], DRAFTS)
    return logits[-1], drafts


@captures
@pytest.mark.skipif(TEST_DEVICE != "cpu", reason="a captured step does not ask a test")
@KINDS
def test_drafts_are_those_of_the_formulas(kind: str, tmp_path: Path) -> None:
    folder, method = target_folder(tmp_path / "model", kind), asked(tmp_path, kind)
    for k in (1, DRAFTS):
        llm = opened(folder, f"{method}:{k}", max_num_batched_tokens=8)
        spy = Spy(llm)
        llm.generate(PROMPTS, SAMPLINGS["greedy"], progress=False)
        assert len(spy.seen) > 30
        for (tokens, drafts), found in list(zip(spy.seen, spy.logits, strict=True))[::5]:
            logits, wanted = drafts_by_the_formulas(spy, kind, tokens, folder)
            assert drafts == wanted[: len(drafts)]  # the last steps of an answer draft fewer
            if k == 1:
                torch.testing.assert_close(found.cpu(), logits, rtol=1e-3, atol=1e-3)


@captures
def test_a_head_that_thinks_as_the_target_is_right(tmp_path: Path) -> None:
    """A target whose layers add nothing says what stands beside a token in its matrices, and so
    does a module that hands the token on."""
    folder = target_folder(tmp_path / "model", "deepseek")
    stored = next(folder.glob("*.safetensors"))
    tensors = load_file(stored)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    stem = mtp.stem_of(mtp.BY_NAME["deepseek"], 2)
    width = mtp.WIDTH
    tensors[f"{stem}eh_proj.weight"] = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
    for name in ("model.norm", f"{stem}enorm", f"{stem}shared_head.norm"):
        tensors[f"{name}.weight"] = torch.ones(width)
    save_file(tensors, stored)
    llm = opened(folder, f"mtp:{DRAFTS}")
    counts = Counts()
    llm.engine.listeners.append(counts)
    found = [r.token_ids for r in llm.generate(PROMPTS, SAMPLINGS["greedy"], progress=False)]
    plain = opened(folder, "off").generate(PROMPTS, SAMPLINGS["greedy"], progress=False)
    assert found == [r.token_ids for r in plain]
    assert counts.figures()["by_position"] == [1.0] * DRAFTS


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    folder, head = target_folder(tmp_path / "model", "eagle3"), head_folder(tmp_path / "head")
    (head / "config.json").write_text(json.dumps(eagle3.CONFIG | {"vocab_size": 98}))
    with pytest.raises(ConfigError, match="the head is for another model"):
        opened(folder, f"eagle3:{head}")
    with pytest.raises(ConfigError, match="no MTP module"):
        opened(folder, "mtp")
