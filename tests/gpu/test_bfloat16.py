"""In bfloat16 on a GPU our tokens are those of Transformers up to near ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from tests.test_models import MODELS, expected

NEAR_TIE = 0.05  # least top-2 gap that counts as a choice; below it bfloat16 may go either way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_tokens_equal_transformers_up_to_near_ties(
    shared: Path, name: str, max_in_flight: int
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shared / "models" / name
    llm = LLM(str(folder), device="cuda", dtype="bfloat16", max_in_flight=max_in_flight)

    def reference(dtype: torch.dtype) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).cuda()

    exact, rounded = reference(torch.float32), reference(torch.bfloat16)
    sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    prompts = [p["prompt_ids"] for p in expected(name)["prompts"]]
    agreed = total = 0
    for prompt, result in zip(prompts, llm.generate(prompts, sampling), strict=True):
        ids = torch.tensor([[*prompt, *result.token_ids]], device="cuda")
        answer = slice(len(prompt) - 1, -1)
        with torch.inference_mode():
            want = exact(ids).logits[0, answer].float().cpu()
            theirs = rounded(ids).logits[0, answer].float().cpu()
        ours = llm.logits(ids[0].tolist())[answer]
        assert (ours - want).norm() <= 2 * (theirs - want).norm()
        chosen = want.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        # A gap that bfloat16 cannot see: less than what the reference itself loses by rounding.
        blur = 2 * (theirs - want).abs().amax(1)
        assert (want.amax(1) - chosen <= blur.clamp_min(NEAR_TIE)).all()
        agreed += int((theirs.argmax(1) == torch.tensor(result.token_ids)).sum())
        total += len(result.token_ids)
    print(f"{name}: {agreed} of {total} tokens are the bfloat16 reference's first choice")
    assert agreed >= 0.95 * total
