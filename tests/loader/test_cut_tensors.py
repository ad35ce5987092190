"""Parameters that are parts of larger tensors come whole through every source, to every rank, and
by the names that older files have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ridgeline import LLM
from ridgeline.architectures import read_spec
from ridgeline.distributed.placement import Placement
from ridgeline.layers.cut_source import of_parameters
from ridgeline.layers.piece import Vector, fill
from ridgeline.loader.checkpoint import open_checkpoint
from ridgeline.loader.parallel import ParallelSource
from tests.distributed.alone import Alone
from tests.layers.driving import Driver, TensorDict, build_decoder
from tests.layers.reference_models import ReferenceModel
from tests.layers.test_agreement import CONFIGS
from tests.loader.test_mapped import in_chunks

CPU = torch.device("cpu")
IDS = [3, 14, 15, 92, 65, 35, 89, 79]
NAMES = ["cohere norms of heads", "falcon groups", "gpt2", "gpt_neox", "phi3 part of a head"]


def written(folder: Path, model: ReferenceModel, older: dict[str, str]) -> Path:
    tensors = {name: tensor.contiguous() for name, tensor in model.tensors.items()}
    for begins, instead in older.items():
        tensors = {
            instead + name.removeprefix(begins) if name.startswith(begins) else name: tensor
            for name, tensor in tensors.items()
        }
    (folder / "config.json").write_text(json.dumps(model.config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_every_source_reads_the_same(name: str, tmp_path: Path) -> None:
    model = ReferenceModel(CONFIGS[name])
    folder, spec = written(tmp_path, model, {}), read_spec(model.config)
    sources = (
        in_chunks(open_checkpoint(folder), 300),
        ParallelSource(open_checkpoint(folder), CPU, num_readers=2, chunk_bytes=300),
        TensorDict(model.tensors),
    )
    found = []
    for source in sources:
        decoder = build_decoder(spec, max_model_len=16, device="cpu")
        decoder.load(source)
        found.append(Driver(decoder).step({"a": IDS})["a"])
    assert all(torch.equal(found[-1], one) for one in found)


@pytest.mark.parametrize("name", [*NAMES[:4], "phi3"])
def test_each_rank_reads_its_rows(name: str) -> None:
    model = ReferenceModel(CONFIGS[name])
    spec, tensors = read_spec(model.config), TensorDict(model.tensors)
    for rank in range(2):
        both = [
            build_decoder(
                spec, max_model_len=16, device="cpu", placement=Placement(rank, 2, Alone())
            )
            for _ in range(2)
        ]
        both[0].load(tensors)
        own = of_parameters(tensors, spec)  # whole parameters, from which this rank's are sliced
        for part in both[1]._parts():
            for piece in part.pieces():
                fill(piece, own)
            if not isinstance(part, Vector):
                part.finish()
        kept, wanted = (decoder.kept() for decoder in both)
        assert all(torch.equal(kept[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("name", "older"),
    [("gpt2", {"transformer.": ""}), ("gpt_neox", {"lm_head.": "embed_out."})],
)
def test_names_of_older_files(name: str, older: dict[str, str], tmp_path: Path) -> None:
    model = ReferenceModel(CONFIGS[name])
    with LLM(str(written(tmp_path, model, older)), device="cpu", dtype="float32") as llm:
        torch.testing.assert_close(llm.logits(IDS), model.logits(IDS), atol=1e-4, rtol=1e-4)
