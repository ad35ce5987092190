"""Decode attention in CUDA C++: a new token of each request, and what prepares it if wanted; or a
few, for few requests.

`cuda/paged_decode.cu` says how, for few requests and for many; `choose_config` which it is. Steps
of 16 keys, all heads at once, are dealt out to the programs as `paged_decode_triton` deals out its
tiles, once a step of the engine (`refresh`), so a captured graph holds for any lengths. Results
depend on the lengths of the whole batch in the last bits, but not on timing. Launches that share a
schedule must not overlap, but for what `decode_with_prologue` reads early. All formats of
`paged_kv`: the 16-bit type of the queries, e4m3, and codes of 8 and of 4 bits.
Letters: as in `paged_decode`; P programs, X = (H + 2 * K) * D packed width, L positions.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int32, c_uint64
from dataclasses import dataclass

import torch

from ridgeline.errors import check
from ridgeline.kernels import nvrtc
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.paged_decode import DecodeBatch
from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kernels.qk_norm_rope_write import HeadNorms

SOURCE = "paged_decode.cu"
STEP_KEYS = 16
RECORD = 32  # int32 per program, of which the schedule's kernel writes 5, and if split 9 + HEAD
HEAD = 8  # steps whose blocks a record names, one for each warp
HEAD_DIMS = (64, 128)
LARGEST_GROUP = 16
MOST_QUERIES = 32  # of a KV head, for all new tokens of a request
MOST_WARPS = 8  # of a CTA, a KV head each
SHARED_BYTES = 228 << 10  # of a multiprocessor of compute capability 9.0
RESERVED_BYTES = 1 << 10  # of that, for each CTA
FEW_HEADS = 64  # KV heads of all requests
MOST_SPLIT_HEADS = 256  # two CTAs for each multiprocessor
WHOLE_STEPS = 33  # of a request that one CTA reads as fast as several and a merge
VECTOR_BYTES = 16  # that a lane loads and stores at a time


@dataclass(frozen=True, slots=True)
class Numbers:
    """How those of a cache are kept: in so many bits, and with what makes numbers of codes."""

    bits: int = 16
    scaled: bool = False


PLAIN, E4M3, CODES_8, CODES_4 = Numbers(), Numbers(8), Numbers(8, True), Numbers(4, True)


def numbers_of(kv: PagedKV) -> Numbers:
    if kv.code_bits:
        return CODES_8 if kv.code_bits == 8 else CODES_4
    return E4M3 if kv.k_NSKD.dtype == torch.float8_e4m3fn else PLAIN


@dataclass(frozen=True, slots=True)
class Config:
    """What tuning may change: steps on their way per warp, CTAs of 8 warps on a multiprocessor (or
    as many more as have fewer warps), and how many steps a program has at least if there are
    enough. `split`: the warps of a CTA, `warps` of them, share one KV head. Requests of up to
    `whole_steps` are not cut then, and of longer ones no two meet in a program, if there are enough
    programs for pieces of up to `uneven` steps more than even shares. Batches of one length are not
    cut where that costs a program no more than `slack` steps."""

    stages: int = 3
    programs_per_sm: int = 1
    min_steps: int = 1
    split: bool = False
    warps: int = MOST_WARPS
    whole_steps: int = 0
    slack: int = 3
    uneven: int = 16


def choose_config(
    head_dim: int,
    num_kv_heads: int,
    max_requests: int,
    numbers: Numbers = PLAIN,
    num_new: int = 1,
) -> Config:
    """The best of a sweep on one H200 (8 KV heads of 128, contexts of 257), in a chain with the
    products before and after. Two steps on their way keep the memory busy where it is; few heads
    are a CTA each, and one of 8 warps where there are fewer than half the multiprocessors. Of fewer
    bits twice as many steps are on their way (contexts of 1,024 and 8,192): more gain nothing. Each
    new token wants a warp, as far as there are some."""
    heads, times = max_requests * num_kv_heads, 1 if numbers == PLAIN else 2
    if heads <= FEW_HEADS or (num_new > 4 and heads <= MOST_SPLIT_HEADS):
        return Config(2 * times, 1, 8, split=True, whole_steps=WHOLE_STEPS)
    if heads <= MOST_SPLIT_HEADS:
        return Config(3 * times, 2, 8, split=True, warps=4, whole_steps=WHOLE_STEPS)
    return Config(2 * times, 1, 2) if head_dim == 128 else Config(2 * times, 2, 2)


@dataclass(frozen=True, slots=True)
class CudaSchedule:
    """Shapes that are compiled in, and what the kernel writes beside its result."""

    config: Config
    numbers: Numbers
    is_fused: bool  # for `decode_with_prologue`, where new tokens are not read from the cache
    num_kv_heads: int
    group: int  # G
    num_new: int  # Q
    head_dim: int
    block_size: int
    max_requests: int
    num_programs: int
    num_warps: int  # of a CTA
    num_groups: int  # of CTAs, grid.y: as many as it takes for all KV heads
    resident: int  # CTAs of a multiprocessor
    records: torch.Tensor  # [P, RECORD] int32
    parts: torch.Tensor  # [2 * P, K, Q * G, D] float32, not normalised
    best: torch.Tensor  # [2 * P, K, Q * G] float32, greatest score, in powers of two
    total: torch.Tensor  # [2 * P, K, Q * G] float32, sum of weights
    arrived: torch.Tensor  # [B, K] int32, zero between launches
    groups_arrived: torch.Tensor  # [2 * P, K] int32, the same

    @property
    def shared_bytes(self) -> int:
        queries = self.group * self.num_new
        return _shared_bytes(self.config, self.num_warps, queries, self.head_dim, self.numbers)


@dataclass(frozen=True, slots=True)
class Prologue:
    """What turns the raw product of q, k and v into queries and cache entries, as
    `qk_norm_rope_write` does; the position of a request's last new token is its length less one. A
    request of length 0 writes nothing, whatever its slot. Positions behind the table are as its
    last one."""

    table_L2D: torch.Tensor  # float32
    slots_T: torch.Tensor  # int64; negative: not written
    norms: HeadNorms | None = None


def unsupported(
    device: torch.device,
    dtype: torch.dtype,
    kv: PagedKV,
    *,
    num_heads: int,
    num_new: int = 1,
    num_requests: int = 1,
) -> str | None:
    """Why this kernel cannot answer; None: it can."""
    k_NSKD, head_dim, numbers = kv.k_NSKD, kv.head_dim, numbers_of(kv)
    _, block_size, num_kv_heads, _ = k_NSKD.shape
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return "needs a CUDA device of compute capability 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"queries in {dtype}: 16 bits"
    if numbers == PLAIN and k_NSKD.dtype != dtype:
        return f"queries in {dtype} over a cache in {k_NSKD.dtype}: 16 bits and the same"
    if head_dim not in HEAD_DIMS or num_heads > LARGEST_GROUP * num_kv_heads:
        return f"heads of {head_dim}, {num_heads} to {num_kv_heads}: 64 or 128, 16 to one"
    if reason := _why_not_so_many(num_heads // num_kv_heads, num_new, num_requests * num_kv_heads):
        return reason
    if block_size % STEP_KEYS:
        return f"blocks of {block_size} tokens: a multiple of {STEP_KEYS}"
    if not _lies_as_plain(kv):
        return "the cache does not lie as K heads and then V heads of a token"
    return None if nvrtc.available() else "NVRTC is not there"


def make_schedule(
    device: torch.device, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
    max_requests: int, numbers: Numbers = PLAIN, num_new: int = 1, config: Config | None = None,
    num_programs: int | None = None, is_fused: bool = True,
) -> CudaSchedule:  # fmt: skip
    """Shared by all layers of these shapes and this window that run one after the other.
    `num_programs` None: as many as the device runs at a time."""
    config = config or choose_config(head_dim, num_kv_heads, max_requests, numbers, num_new)
    group = num_heads // num_kv_heads
    queries = group * num_new
    check(num_heads == group * num_kv_heads, "query heads are a multiple of KV heads")
    check(head_dim in HEAD_DIMS and 1 <= group <= LARGEST_GROUP, "heads that the kernel takes")
    several = config.split and is_fused and queries <= MOST_QUERIES
    check(num_new == 1 or several, "new tokens that the kernel takes", num_new=num_new)
    if config.split:
        warps, groups, resident = config.warps, num_kv_heads, config.programs_per_sm
    else:
        warps = max(n for n in range(1, MOST_WARPS + 1) if num_kv_heads % n == 0)
        groups, resident = num_kv_heads // warps, config.programs_per_sm * (MOST_WARPS // warps)
    shared = _shared_bytes(config, warps, queries, head_dim, numbers)
    needed = resident * (shared + RESERVED_BYTES)
    check(needed <= SHARED_BYTES, "the ring fits", needs=needed, has=SHARED_BYTES, config=config)
    if num_programs is None:
        cores = torch.cuda.get_device_properties(device).multi_processor_count
        num_programs = max(1, cores * resident // groups)

    def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    pieces = 2 * num_programs, num_kv_heads, queries
    return CudaSchedule(
        config=config, numbers=numbers, is_fused=is_fused, num_kv_heads=num_kv_heads, group=group,
        num_new=num_new, head_dim=head_dim, block_size=block_size, max_requests=max_requests,
        num_programs=num_programs, num_warps=warps, num_groups=groups, resident=resident,
        records=blank(num_programs, RECORD, dtype=torch.int32), parts=blank(*pieces, head_dim),
        best=blank(*pieces), total=blank(*pieces),
        arrived=blank(max_requests, num_kv_heads, dtype=torch.int32),
        groups_arrived=blank(2 * num_programs, num_kv_heads, dtype=torch.int32),
    )  # fmt: skip


def refresh(schedule: CudaSchedule, batch: DecodeBatch) -> None:
    """Deal out the steps of these lengths: once a step of the engine and window."""
    from ridgeline.kernels.paged_decode_triton import schedule_kernel

    num_requests = batch.seq_lens_B.shape[0]
    check(num_requests <= schedule.max_requests, "more requests than the schedule has room for")
    schedule_kernel[(schedule.num_programs,)](
        batch.seq_lens_B, batch.query_start_B1, schedule.records, num_requests, NUM_KV_HEADS=1,
        WINDOW=batch.window or 0, BLOCK_N=STEP_KEYS, BLOCK_B=1 << (num_requests - 1).bit_length(),
        MIN_TILES=schedule.config.min_steps, RECORD=RECORD, MAX_NEW=schedule.num_new,
        WHOLE=schedule.config.whole_steps, SLACK=schedule.config.slack,
        UNEVEN=schedule.config.uneven, UNREAD=schedule.num_new if schedule.is_fused else 0,
        tables=batch.block_tables_BM, table_rows=batch.rows_B,
        table_row=batch.block_tables_BM.stride(0), BLOCK_SIZE=schedule.block_size,
        HEAD=HEAD if schedule.config.split else 0, num_warps=4,
    )  # fmt: skip


def paged_decode_cuda(
    q_THD: torch.Tensor, kv: PagedKV, batch: DecodeBatch, scale: float, schedule: CudaSchedule,
    out_THD: torch.Tensor, *, pdl: bool | None = None,
) -> None:  # fmt: skip
    """`paged_decode` where every request has one new token, which is in the cache already."""
    check(q_THD.shape == out_THD.shape, "an answer for each query")
    check(q_THD.shape[1:] == _heads(schedule), "the schedule's queries", shape=tuple(q_THD.shape))
    check(q_THD.stride(2) == 1, "rows of D are contiguous")
    check(_on_vectors(q_THD), "queries lie on 16 bytes")
    _launch(q_THD, q_THD.stride(1), kv, batch, scale, schedule, out_THD, None, pdl, False)


def decode_with_prologue(
    qkv_TX: torch.Tensor, prologue: Prologue, kv: PagedKV, batch: DecodeBatch, scale: float,
    schedule: CudaSchedule, out_THD: torch.Tensor, *, pdl: bool | None = None, early: bool = False,
) -> None:  # fmt: skip
    """`qk_norm_rope_write` and then `paged_decode`, in one launch, where every request has as many
    new tokens as the schedule says. No two of them, of requests of a length above 0, have the same
    slot, but for slots nobody reads.

    `early`: the kernel before this one wrote only `qkv_TX` and no more than that; what is older is
    read before that kernel has ended. Every kernel here that lets the next one begin has waited for
    the one before it, so whatever is older is complete then."""
    heads, size = _heads(schedule)
    width = (heads + 2 * schedule.num_kv_heads) * size
    tokens = qkv_TX.shape[0]
    check(qkv_TX.shape == (tokens, width), "the packed width is (H + 2 K) heads", width=width)
    check(out_THD.shape == (tokens, heads, size), "an answer for each token")
    check(qkv_TX.stride(1) == 1 and _on_vectors(qkv_TX), "packed rows lie on 16 bytes")
    check(prologue.slots_T.shape == (tokens,), "each token has a slot", tokens=tokens)
    check(prologue.slots_T.dtype == torch.int64, "slots are int64")
    check(prologue.table_L2D.shape[1:] == (2, size), "the table has cosines and sines of a head")
    check(prologue.table_L2D.dtype == torch.float32, "the table is float32")
    check(
        prologue.slots_T.is_contiguous() and prologue.table_L2D.is_contiguous(),
        "dense slots, table",
    )
    for weight in _weights(prologue):
        plain = weight.shape == (size,) and weight.is_contiguous() and _on_vectors(weight)
        check(plain and weight.dtype == qkv_TX.dtype, "norm weights of a head, in q's type")
    _launch(qkv_TX, size, kv, batch, scale, schedule, out_THD, prologue, pdl, early)


def _launch(
    q: torch.Tensor, q_head: int, kv: PagedKV, batch: DecodeBatch, scale: float,
    schedule: CudaSchedule, out_THD: torch.Tensor, prologue: Prologue | None, pdl: bool | None,
    early: bool,
) -> None:  # fmt: skip
    _check_batch(q, kv, batch, schedule, out_THD)
    check(schedule.is_fused == (prologue is not None), "a schedule for what is launched")
    pdl = launches_early(q.device) if pdl is None else pdl
    defines = _defines(schedule, kv, batch, q.dtype, prologue, early=pdl)
    name = "paged_decode_split" if schedule.config.split else "paged_decode"
    kernel = nvrtc.kernel(SOURCE, name, defines, q.device)
    nvrtc.allow_shared(kernel, schedule.shared_bytes)
    nothing = c_uint64(0)
    weights = _weights(prologue) or (nothing, nothing)
    args: list[nvrtc.Arg] = [
        q, kv.k_NSKD, out_THD, batch.block_tables_BM,
        nothing if batch.rows_B is None else batch.rows_B, batch.seq_lens_B, batch.query_start_B1,
        nothing if prologue is None else prologue.slots_T,
        nothing if prologue is None else prologue.table_L2D, *weights, schedule.records,
        schedule.parts, schedule.best, schedule.total, schedule.arrived, schedule.groups_arrived,
        c_int32(batch.seq_lens_B.shape[0]), c_int32(batch.block_tables_BM.stride(0)),
        c_int32(q.stride(0)), c_int32(q_head), c_int32(out_THD.stride(0)),
        c_int32(out_THD.stride(1)), c_float(scale * math.log2(math.e)),
        c_float(prologue.norms.eps if prologue is not None and prologue.norms is not None else 0.0),
        c_int32(int(early)), nothing if kv.k_scales_NSK is None else kv.k_scales_NSK,
        c_int32(1 if prologue is None else prologue.table_L2D.shape[0]),
    ]  # fmt: skip
    grid = schedule.num_programs, schedule.num_groups, 1
    kernel.launch(grid, 32 * schedule.num_warps, schedule.shared_bytes, args, pdl=pdl)


def _defines(
    schedule: CudaSchedule,
    kv: PagedKV,
    batch: DecodeBatch,
    dtype: torch.dtype,
    prologue: Prologue | None,
    *,
    early: bool,
) -> dict[str, int | str]:
    return {
        "HEAD_DIM": schedule.head_dim,
        "GROUP": schedule.group,
        "NEW": schedule.num_new,
        "KV_HEADS": schedule.num_kv_heads,
        "WARPS": schedule.num_warps,
        "BLOCK_SIZE": kv.k_NSKD.shape[1],
        "SPLIT": int(schedule.config.split),
        "STAGES": schedule.config.stages,
        "RESIDENT": schedule.resident,
        "WINDOW": batch.window or 0,
        "NAMED_ROWS": int(batch.rows_B is not None),
        "FUSED": int(prologue is not None),
        "NORM": int(prologue is not None and prologue.norms is not None),
        "DEPENDENT": int(early),
        "BFLOAT16": int(dtype == torch.bfloat16),
        "BITS": schedule.numbers.bits,
        "SCALED": int(schedule.numbers.scaled),
    }


def _check_batch(
    q: torch.Tensor,
    kv: PagedKV,
    batch: DecodeBatch,
    schedule: CudaSchedule,
    out_THD: torch.Tensor,
) -> None:
    check(q.dtype in (torch.bfloat16, torch.float16), "queries have 16 bits", dtype=q.dtype)
    numbers = numbers_of(kv)
    check(q.dtype == out_THD.dtype, "one type for queries and answer")
    same = numbers != PLAIN or q.dtype == kv.k_NSKD.dtype
    check(same, "one type for queries and cache", dtype=kv.k_NSKD.dtype)
    check(numbers == schedule.numbers, "the schedule's cache", numbers=numbers)
    check(out_THD.stride(2) == 1 and _on_vectors(out_THD), "answers lie on 16 bytes")
    shape = schedule.num_kv_heads, schedule.head_dim
    its_shape = kv.k_NSKD.shape[2], kv.head_dim
    check(its_shape == shape, "the schedule's KV shape", shape=its_shape)
    check(_lies_as_plain(kv), "the cache lies as K heads and then V heads of a token")
    size = kv.k_NSKD.shape[1]
    check(size == schedule.block_size, "the schedule's blocks", block_size=size)
    check(size % STEP_KEYS == 0, "blocks are a multiple of 16 tokens")
    check(batch.max_new == schedule.num_new, "the schedule's new tokens", max_new=batch.max_new)
    num_requests = batch.seq_lens_B.shape[0]
    whole_rows = q.shape[0] == num_requests * batch.max_new or batch.max_new == 1
    check(whole_rows, "so many new tokens of each request", tokens=q.shape[0])
    check(num_requests <= schedule.max_requests, "more requests than the schedule has room for")
    check(batch.query_start_B1.shape == (num_requests + 1,), "query_start has one row more")
    whole = batch.block_tables_BM, batch.seq_lens_B, batch.query_start_B1
    check(all(x.dtype == torch.int32 and x.stride(-1) == 1 for x in whole), "dense int32 indices")
    rows = batch.rows_B
    check(rows is None or (rows.dtype == torch.int64 and rows.is_contiguous()), "rows are int64")


def _lies_as_plain(kv: PagedKV) -> bool:
    """As `paged_kv.plain_views` makes it, the strides being compiled in; scales in the same way,
    each with its low if there are lows."""
    k_NSKD, v_NSKD = kv.k_NSKD, kv.v_NSKD
    _, block_size, heads, size = k_NSKD.shape
    token = 2 * heads * size
    return (
        k_NSKD.shape == v_NSKD.shape
        and k_NSKD.dtype == v_NSKD.dtype
        and k_NSKD.stride() == v_NSKD.stride() == (block_size * token, token, size, 1)
        and v_NSKD.data_ptr() - k_NSKD.data_ptr() == heads * size * k_NSKD.element_size()
        and k_NSKD.data_ptr() % VECTOR_BYTES == 0
        and _scales_lie_as_plain(kv)
    )


def _scales_lie_as_plain(kv: PagedKV) -> bool:
    scales, v_scales = kv.k_scales_NSK, kv.v_scales_NSK
    if scales is None or v_scales is None:
        return True
    _, block_size, heads = scales.shape
    each = 1 if kv.k_lows_NSK is None else 2
    token = 2 * heads * each
    lows_follow = all(
        low is None or low.data_ptr() - scale.data_ptr() == 2
        for scale, low in ((scales, kv.k_lows_NSK), (v_scales, kv.v_lows_NSK))
    )
    return (
        scales.dtype == v_scales.dtype == torch.float16
        and scales.stride() == v_scales.stride() == (block_size * token, token, each)
        and v_scales.data_ptr() - scales.data_ptr() == heads * each * 2
        and scales.data_ptr() % 4 == 0
        and lows_follow
    )


def _on_vectors(x: torch.Tensor) -> bool:
    places = x.data_ptr(), *(n * x.element_size() for n in x.stride()[:-1])
    return all(place % VECTOR_BYTES == 0 for place in places)


def _heads(schedule: CudaSchedule) -> tuple[int, int]:
    return schedule.num_kv_heads * schedule.group, schedule.head_dim


def _weights(prologue: Prologue | None) -> tuple[torch.Tensor, ...]:
    if prologue is None or prologue.norms is None:
        return ()
    return prologue.norms.q_weight_D, prologue.norms.k_weight_D


def _why_not_so_many(group: int, num_new: int, kv_heads: int) -> str | None:
    """`kv_heads` of all requests."""
    if num_new == 1:
        return None
    if group * num_new > MOST_QUERIES:
        return f"{num_new} new tokens of {group} heads: {MOST_QUERIES} queries"
    if kv_heads > MOST_SPLIT_HEADS:
        return f"several new tokens of {kv_heads} KV heads: {MOST_SPLIT_HEADS}"
    return None


def _shared_bytes(
    config: Config, num_warps: int, queries: int, head_dim: int, numbers: Numbers
) -> int:
    """A ring of steps for each warp, keys, values and 4 bytes for the scale of each; of a split CTA
    the parts of its warps in the same place, and two numbers of each part and query."""
    row = head_dim * numbers.bits // 8 + 4 * numbers.scaled
    ring = config.stages * STEP_KEYS * 2 * row
    if not config.split:
        return num_warps * ring
    parts = queries * (head_dim + 4) * 4
    return num_warps * (max(ring, parts) + queries * 8) + 4
