"""Weights that come many at once are those that come one by one, and nothing outlives a failure."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.distributed.placement import Placement
from ridgeline.errors import ConfigError, InternalError
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.piece import Piece
from ridgeline.loader import parallel
from ridgeline.loader.checkpoint import open_checkpoint
from ridgeline.loader.header import TensorEntry
from ridgeline.loader.parallel import Lane, ParallelSource, chunks_of
from tests.distributed.alone import Alone
from tests.layers.driving import build_decoder
from tests.loader.write import write_safetensors, write_sharded
from tests.tiny_model import tiny_config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith("weights")]


def random_tensors(
    config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = expected_tensors(read_spec(config))
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    write_sharded(folder, tensors, num_shards)
    return folder


def source_of(folder: Path, chunk_bytes: int, num_readers: int = 3) -> ParallelSource:
    checkpoint = open_checkpoint(folder)
    return ParallelSource(checkpoint, CPU, num_readers=num_readers, chunk_bytes=chunk_bytes)


def parameters(decoder: Decoder) -> list[torch.Tensor]:
    return [tensor for part in decoder._parts() for tensor in part.tensors()]


def same(one: Decoder, two: Decoder) -> bool:
    pairs = zip(parameters(one), parameters(two), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def decoders(config: dict[str, Any], **options: Any) -> tuple[Decoder, Decoder]:
    options = {"device": "cpu"} | options
    make = partial(build_decoder, read_spec(config), max_model_len=64, **options)
    return make(), make()


# ---------------------------------------------------------------------- whole models


@pytest.mark.parametrize("chunk_bytes", [72, 1001, 1 << 20])
@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        tiny_config(model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
        tiny_config(
            model_type="mixtral",
            architectures=["MixtralForCausalLM"],
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
    ],
    ids=["llama", "qwen2", "mixtral"],
)
def test_a_model_is_the_one_that_is_read_piece_by_piece(
    tmp_path: Path, config: dict[str, Any], chunk_bytes: int
) -> None:
    folder = write(tmp_path / "model", random_tensors(config))
    plain, fast = decoders(config)
    seen: list[int] = []
    plain.load(open_checkpoint(folder), seen.append)
    counted, seen = seen, []
    fast.load(source_of(folder, chunk_bytes), seen.append)
    assert same(plain, fast)
    assert seen == counted


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("served", [torch.float32, torch.float16])
@pytest.mark.parametrize("weight_format", ["plain", "fp8"])
def test_dtypes_are_cast_as_before(
    tmp_path: Path, stored: torch.dtype, served: torch.dtype, weight_format: str
) -> None:
    config = tiny_config()
    folder = write(tmp_path / "model", random_tensors(config, stored))
    plain, fast = decoders(config, dtype=served, weight_format=weight_format)
    plain.load(open_checkpoint(folder))
    fast.load(source_of(folder, 500))
    assert same(plain, fast)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("chunk_bytes", [40, 256, 1000, 1 << 20])
def test_a_rank_reads_its_share(tmp_path: Path, rank: int, chunk_bytes: int) -> None:
    """Rows of some matrices, columns of others: whole rows that are cut, or parts of long ones."""
    config = tiny_config()
    folder = write(tmp_path / "model", random_tensors(config))
    plain, fast = decoders(config, placement=Placement(rank, 2, Alone()))
    plain.load(open_checkpoint(folder))
    fast.load(source_of(folder, chunk_bytes))
    assert same(plain, fast)


def test_weights_are_given_up_as_they_are_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the ring holds a matrix whose format has made another of it."""
    import weakref

    from ridgeline.quantization.fp8 import Fp8Weights

    held: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []
    finish = Fp8Weights.finish

    def watched(self: Fp8Weights, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # The one before may still be the local of a loop; none before that may.
        alive.append(sum(ref() is not None for ref in held[:-1]))
        held.append(weakref.ref(found["weight"].untyped_storage()))
        return finish(self, found)

    monkeypatch.setattr(Fp8Weights, "finish", watched)
    config = tiny_config(num_hidden_layers=4)
    folder = write(tmp_path / "model", random_tensors(config))
    decoder = decoders(config, weight_format="fp8")[0]
    decoder.load(source_of(folder, 300, num_readers=1))
    assert len(alive) > 10
    assert set(alive) == {0}


# ---------------------------------------------------------------------- single pieces


def entry(shape: tuple[int, ...], dtype: str = "F32", start: int = 7) -> TensorEntry:
    size = {"F32": 4, "BF16": 2}[dtype]
    return TensorEntry("a", dtype, shape, start, start + torch.Size(shape).numel() * size)


def bring(tmp_path: Path, tensor: torch.Tensor, piece: Piece, chunk_bytes: int) -> list[int]:
    folder = tmp_path / "one"
    folder.mkdir()
    tensors = {"odd": torch.zeros(3, dtype=torch.uint8), "a": tensor}
    write_safetensors(folder / "model.safetensors", tensors, pad=False)
    with source_of(folder, chunk_bytes).bring([piece]) as sizes:
        return list(sizes)


def test_random_pieces_of_random_tensors(tmp_path: Path) -> None:
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(40):
        shape = (rng.randint(1, 9), rng.randint(1, 9))
        stored = rng.choice([torch.float32, torch.float16, torch.int16])
        tensor = torch.arange(shape[0] * shape[1]).view(shape).to(stored)
        dim = rng.choice([None, 0, 1])
        start, length = 0, 0
        want = tensor
        if dim is not None:
            start = rng.randrange(shape[dim])
            length = rng.randint(0, shape[dim] - start)
            want = tensor.narrow(dim, start, length)
        target = torch.full(want.shape, -1, dtype=rng.choice([torch.float32, stored]))
        limit = rng.randint(8, 100)
        where = tmp_path / str(number)
        where.mkdir()
        sizes = bring(where, tensor, Piece("a", target, dim, start), limit)
        assert sizes == [want.numel() * want.element_size()]
        assert torch.equal(target, want.to(target.dtype)), (number, shape, dim, start, length)


def test_no_chunk_is_over_the_limit() -> None:
    for limit in (16, 100, 4096):
        for piece in (
            Piece("a", torch.empty(30, 20)),
            Piece("a", torch.empty(11, 20), 0, 5),
            Piece("a", torch.empty(30, 7), 1, 3),
        ):
            chunks = list(chunks_of(piece, Path("f"), entry((30, 20)), limit))
            assert max(chunk.num_bytes for chunk in chunks) <= limit
            assert sum(chunk.target.numel() for chunk in chunks) == piece.target.numel()


@pytest.mark.parametrize(
    "piece",
    [
        Piece("a", torch.empty(20, 30)),
        Piece("a", torch.empty(600)),
        Piece("a", torch.empty(11, 20), 0, 25),
        Piece("a", torch.empty(11, 8), 0, 2),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(piece: Piece) -> None:
    with pytest.raises(InternalError):
        list(chunks_of(piece, Path("f"), entry((30, 20)), 100))


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("weight_format", ["plain", "fp8"])
def test_damage_is_found_and_named(
    tmp_path: Path, bad: float, dtype: torch.dtype, weight_format: str
) -> None:
    config = tiny_config()
    tensors = random_tensors(config, dtype)
    name = "model.layers.1.mlp.up_proj.weight"
    values = tensors[name].float()
    values[-1, -2] = bad
    tensors[name] = values.to(dtype)
    folder = write(tmp_path / "model", tensors)
    decoder = decoders(config, weight_format=weight_format)[0]
    with pytest.raises(ConfigError, match=rf"model-0000.*safetensors: tensor '{name}' holds NaN"):
        decoder.load(source_of(folder, 700))


def test_damage_outside_of_a_rank_s_columns_is_not_its_own(tmp_path: Path) -> None:
    tensor = torch.zeros(4, 6)
    tensor[2, 5] = float("nan")
    assert bring(tmp_path, tensor, Piece("a", torch.empty(4, 3), 1, 1), 50) == [48]


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write(tmp_path / "model", random_tensors(config))
    source = source_of(folder, 1000)
    file = folder / "model-00002-of-00002.safetensors"
    with file.open("r+b") as open_file:
        open_file.truncate(file.stat().st_size // 2)
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors: ends at byte \d+"):
        decoders(config)[0].load(source)


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write(tmp_path / "model", random_tensors(config))
    source = source_of(folder, 1000)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00001-of-00002.safetensors: cannot be read \(No"):
        decoders(config)[0].load(source)


def raising(after: int, fault: BaseException) -> Callable[[int], None]:
    calls = 0

    def progress(done: int) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise fault

    return progress


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError("elsewhere")])
def test_what_stops_the_caller_stops_the_readers(tmp_path: Path, fault: BaseException) -> None:
    """Ctrl-C comes to the thread that called; the fixture sees that the others have ended."""
    config = tiny_config()
    folder = write(tmp_path / "model", random_tensors(config))
    with pytest.raises(type(fault)):
        decoders(config)[0].load(source_of(folder, 100), raising(5, fault))


def test_an_error_of_the_device_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(lane: Lane, chunk: parallel.Chunk, buffer: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Lane, "place", place)
    config = tiny_config()
    folder = write(tmp_path / "model", random_tensors(config))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        decoders(config)[0].load(source_of(folder, 100))


# ---------------------------------------------------------------------- the ring


def test_buffers_are_bounded_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow device: a buffer is written to again only after what was sent from it has left."""
    made: list[torch.Tensor] = []
    busy: set[int] = set()
    lock = threading.Lock()
    waits: list[int] = []
    buffer, place, read_into = Lane.buffer, Lane.place, parallel.read_into

    def counted(lane: Lane) -> torch.Tensor:
        with lock:
            made.append(buffer(lane))
            return made[-1]

    def placed(lane: Lane, chunk: parallel.Chunk, where: torch.Tensor) -> torch.Tensor | None:
        with lock:
            busy.add(where.data_ptr())
        lane.last = where.data_ptr()  # type: ignore[attr-defined]
        return place(lane, chunk, where)

    def mark(lane: Lane) -> Callable[[], None]:
        sent: int = lane.last  # type: ignore[attr-defined]

        def wait() -> None:
            with lock:
                busy.discard(sent)
                waits.append(sent)

        return wait

    def read(where: torch.Tensor, path: Path, offset: int) -> None:
        with lock:
            assert where.data_ptr() not in busy
        read_into(where, path, offset)

    monkeypatch.setattr(Lane, "buffer", counted)
    monkeypatch.setattr(Lane, "place", placed)
    monkeypatch.setattr(Lane, "mark", mark)
    monkeypatch.setattr(parallel, "read_into", read)
    config = tiny_config()
    folder = write(tmp_path / "model", random_tensors(config))
    plain, fast = decoders(config)
    plain.load(open_checkpoint(folder))
    source = source_of(folder, 200)
    fast.load(source)
    assert same(plain, fast)
    assert len(made) == source.max_buffers
    assert all(len(tensor) == 200 for tensor in made)
    assert len(waits) > 10 * source.max_buffers
