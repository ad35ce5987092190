"""From a configuration to a running engine: the only file that names concrete classes together."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from msgspec import structs

from ridgeline import __version__, demo
from ridgeline.architectures import FAMILIES, read_spec
from ridgeline.architectures.kv_groups import KVGroup, kv_groups
from ridgeline.architectures.scheme_config import (
    is_quantized,
    matrix_schemes,
    unpacked_matrices,
)
from ridgeline.architectures.spec import NATIVE, TRANSFORMERS, ModelSpec, check_served
from ridgeline.architectures.stages import stage_groups, stage_spec
from ridgeline.asked import check_asked, check_settings
from ridgeline.attention import choose_backend
from ridgeline.build_draft import DraftSource, draft_source, open_drafting
from ridgeline.build_ranks import check_cards, held_bytes, meet, open_ranks, start_ranks, watching
from ridgeline.clock import Clock, WallClock, process_seconds
from ridgeline.config import EngineConfig, ResolvedConfig, without_drafts
from ridgeline.cost.expert_placement import exchange_price
from ridgeline.cost.pricer import Pricer
from ridgeline.costing import asked_drafts, draft_length_controller, engine_header, engine_pricer
from ridgeline.devices import Device, open_device
from ridgeline.distributed import messages
from ridgeline.distributed.links import Ranks
from ridgeline.distributed.placement import Placement
from ridgeline.engine import Engine
from ridgeline.errors import ConfigError, RequestFault
from ridgeline.executor.decode_graphs import why_not_captured
from ridgeline.executor.drafter import Drafting
from ridgeline.executor.expert_balance import ExpertBalance
from ridgeline.executor.grammar_masks import GrammarMasks
from ridgeline.executor.group import GroupExecutor, GroupScorer, GroupWarmUp, WaveExecutor
from ridgeline.executor.local import LocalExecutor
from ridgeline.executor.scorer import Scorer
from ridgeline.executor.stage import StageExecutor
from ridgeline.executor.warm_up import NUMBERS_OF_DRAFTS, WARM_UP_S, WarmUp
from ridgeline.figures import scaled
from ridgeline.formats import CHECKPOINT, MODEL
from ridgeline.generation import GenerationDefaults, generation_defaults
from ridgeline.kernels.cache import KernelCounts, prepare_kernels
from ridgeline.kernels.cpu import native
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.piece import TensorSource
from ridgeline.loader import (
    Checkpoint,
    ModelFolder,
    open_checkpoint,
    read_config,
    read_generation_config,
    resolve_model,
)
from ridgeline.loader.gguf_checkpoint import GGUFCheckpoint
from ridgeline.loader.packs import Packs, open_packs, pack_key
from ridgeline.loader.parallel import ParallelSource
from ridgeline.loader.quantized_checkpoint import UnpackedSource, check_model
from ridgeline.log import say
from ridgeline.observe.engine_header import EngineHeader
from ridgeline.observe.event_log import LogFile, Recorder
from ridgeline.observe.evidence import RunRecord
from ridgeline.quantization import open_weight_format
from ridgeline.resolve import MemoryRow, RankMemory, resolve, with_mixed_tokens
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.block_pools import open_pools
from ridgeline.scheduler.policies import make_policy
from ridgeline.scheduler.policies.base import PolicySetting
from ridgeline.scheduler.policies.step_times import LearnedPricer
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.speculation.controller import DraftLengthController
from ridgeline.speculation.draft_model import DraftModel
from ridgeline.startup import Phase, StartUp
from ridgeline.step import StepPricer
from ridgeline.text.chat import ChatTemplate, load_chat_template
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer, named_tokenizer
from ridgeline.text.vocabulary import Vocabulary

DIGESTED_TENSORS = 64
MOST_LETTERS = 100  # of a model type that another library is asked for
HINT = (
    "Transformers may know it: with pip install 'ridgeline[transformers]' its modules run families "
    "that are not ours"
)
logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (stage, done, of how many)


@dataclass(frozen=True, slots=True)
class Built:
    """Everything that a front (offline API, server, evaluation) needs."""

    engine: Engine
    scorer: Scorer | GroupScorer
    spec: ModelSpec
    resolved: ResolvedConfig
    memory: tuple[MemoryRow, ...]
    device: Device
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    generation: GenerationDefaults
    run_record: RunRecord
    pricer: Pricer
    event_log: LogFile | None = None
    startup: tuple[Phase, ...] = ()
    kernels: KernelCounts | None = None
    warm_up: WarmUp | GroupWarmUp | None = None  # its rest may be done whenever nothing runs
    ranks: Ranks | None = None  # the other ones, where there are several
    grammars: GrammarMasks | None = None  # None: no answer can be held to a grammar

    @property
    def no_grammars(self) -> str:
        """Why no answer can be held to a grammar; "" where any can."""
        return no_grammars(self.resolved)

    def learn(self, vocabulary: Vocabulary | None, end_token_ids: frozenset[int]) -> None:
        """What structured outputs are made of, where the engine was built without a tokenizer."""
        if self.grammars is not None and vocabulary is not None:
            size = self.spec.vocab_size
            make = partial(vocabulary.grammar_compiler, size, end_token_ids)
            self.grammars.make_compiler = make

    def check_structured(self, constraint: str) -> None:
        """Compile what an answer must be. RequestFault where that cannot be had."""
        grammars = self.grammars
        if grammars is None or grammars.make_compiler is None:
            why = self.no_grammars or "this model has no tokenizer"
            raise RequestFault(
                f"structured_outputs: not served here: {why}",
                param="structured_outputs",
                code="unsupported_parameter",
            )
        grammars.compiler.compile(constraint)

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self.generation.end_token_ids

    def close(self) -> None:
        """Nothing more will happen here."""
        if self.event_log is not None:
            self.event_log.close()
        if self.ranks is not None:
            self.ranks.close()


@dataclass(frozen=True, slots=True)
class TokenizerSide:
    """A model without its weights."""

    folder: ModelFolder
    spec: ModelSpec
    text: Path  # where the tokenizer is
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    generation: GenerationDefaults


def build_tokenizer_side(
    config: EngineConfig,
    progress: Progress | None = None,
    startup: StartUp | None = None,
    *,
    reads_text: bool = True,
) -> TokenizerSide:
    """Find the model and read everything but its weights; the tokenizer and the chat template only
    if `reads_text`. Raises ConfigError."""
    startup = startup or StartUp()
    check_asked(config)  # before the model, which may have to be downloaded first
    text = None if config.tokenizer is None else named_tokenizer(config.tokenizer)
    with startup.phase("config"):
        folder = resolve_model(demo.located(config.model), progress=progress)
        if config.model.startswith(demo.PREFIX):
            folder = replace(folder, name=config.model)
        spec = _spec(config, folder)
    text = text or folder.path
    tokenizer = chat_template = None
    if reads_text:
        with startup.phase("tokenizer"):
            tokenizer = load_tokenizer(text)
            chat_template = load_chat_template(text, tokenizer)
    end = spec.eos_token_ids
    if not end and tokenizer is not None and tokenizer.eos_token_id is not None:
        end = (tokenizer.eos_token_id,)
    generation = generation_defaults(read_generation_config(folder.path), end)
    return TokenizerSide(folder, spec, text, tokenizer, chat_template, generation)


def _spec(config: EngineConfig, folder: ModelFolder) -> ModelSpec:
    """As `implementation` says; ConfigError for a family that nobody here serves."""
    values = read_config(folder.path)
    asked, is_installed = config.implementation, find_spec(TRANSFORMERS) is not None
    model_type = values.get("model_type")
    is_name = isinstance(model_type, str) and len(model_type) <= MOST_LETTERS
    is_other = is_name and model_type not in FAMILIES and folder.path.is_dir()
    if asked == TRANSFORMERS or (asked == "auto" and is_other and is_installed):
        from ridgeline.layers.transformers_model import foreign_spec

        return foreign_spec(folder.path, str(model_type))
    try:
        spec = read_spec(values)
        check_served(spec)
    except ConfigError as error:
        if asked == "auto" and is_other:
            raise ConfigError(f"{error}. {HINT}") from None
        raise
    return spec


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model and a device for it, before anything is decided or loaded."""

    config: EngineConfig
    side: TokenizerSide
    device: Device
    checkpoint: Checkpoint | None
    kernels: KernelCounts | None

    def digest(self) -> str:
        """The same for the same model, wherever its files are and however it is cut into them: of
        all shapes, and of the beginnings of some tensors."""
        told = hashlib.sha256(repr(self.side.spec).encode())
        if self.checkpoint is not None:
            names = sorted(self.checkpoint.names())
            shapes = [(name, self.checkpoint.shape(name)) for name in names]
            told.update(repr(shapes).encode())
            for name in names[:: -(-len(names) // DIGESTED_TENSORS)]:
                first = self.checkpoint.slice(name, 0, 0, 1).contiguous()
                told.update(first.view(torch.uint8).numpy().tobytes())
        return told.hexdigest()


def open_model(
    config: EngineConfig,
    progress: Progress | None = None,
    startup: StartUp | None = None,
    *,
    reads_text: bool = True,
    device_name: str | None = None,
) -> OpenModel:
    """On the device of that name, or the one asked for. Raises ConfigError."""
    startup = startup or StartUp()
    check_settings(config)  # before a device is looked for by what may be no name
    # Before a model is fetched for a device that is not there.
    device = open_device(device_name or config.device)
    side = build_tokenizer_side(config, progress, startup, reads_text=reads_text)
    with startup.phase("headers"):
        checkpoint = _open(config, side.folder.path, side.spec)
    with startup.phase("device"):
        device.memory_free()  # makes a GPU's context, so that no other phase does
    with startup.phase("Triton"):
        kernels = prepare_kernels(device.torch_device)
    return OpenModel(config, side, device, checkpoint, kernels)


@dataclass(frozen=True, slots=True)
class Rank:
    """What each rank has of an engine, its share of the model; the only rank has all of it."""

    decoder: Decoder
    kv: KVCache
    executor: LocalExecutor
    scorer: Scorer
    drafting: Drafting | None
    resolved: ResolvedConfig  # as it was, but for drafts that cannot be had


def build_rank(
    opened: OpenModel,
    resolved: ResolvedConfig,
    placement: Placement,
    progress: Progress | None = None,
    startup: StartUp | None = None,
) -> Rank:
    """Takes the memory. Raises ConfigError for weights that are damaged or do not go together."""
    startup = startup or StartUp()
    config, side, device, spec = opened.config, opened.side, opened.device, opened.side.spec
    groups = kv_groups(spec)
    if placement.pipeline is not None:
        layers = range(*resolved.stages[placement.pipeline.stage])
        spec, groups = stage_spec(spec, layers), stage_groups(groups, layers)
    packs = open_packs(config.pack_cache)
    torch.set_num_threads(resolved.threads)
    if device.name == "cpu":
        native.set_threads(resolved.threads)
        native.announce()
    keeps = packs if device.name == "cpu" else None
    make = partial(_decoder, placement=placement, packs=keeps, progress=progress, startup=startup)
    decoder = make(resolved, spec, device, opened.checkpoint)
    with startup.phase("cache") as opening:
        kv = _cache(resolved, spec, groups, device, placement)
        opening.detail = scaled(kv.num_bytes, "B")

    def open_draft(source: DraftSource) -> Decoder:
        return _draft_decoder(config, resolved, source, spec.vocab_size, device, packs, startup)

    def tokenizer() -> Tokenizer | None:
        return side.tokenizer or load_tokenizer(side.text)

    why_not = _why_not_captured(decoder, kv) if resolved.max_captured_rows else None
    try:
        drafting = open_drafting(resolved, decoder, kv, tokenizer, open_draft, why_not)
    except ConfigError as problem:
        if config.speculate != "auto":
            raise
        say(logger, logging.WARNING, "nothing is drafted", reason=problem)
        drafting, resolved = None, without_drafts(resolved)
    executor = _executor(resolved, device, decoder, kv, drafting, placement, why_not)
    limits = {"block_size": resolved.block_size, "max_model_len": resolved.max_model_len}
    scorer = Scorer(decoder, device, **limits)
    return Rank(decoder, kv, executor, scorer, drafting, resolved)


def build(
    config: EngineConfig,
    progress: Progress | None = None,
    clock: Clock | None = None,
    startup: StartUp | None = None,
    *,
    reads_text: bool = True,
) -> Built:
    """A ready engine. Raises ConfigError (DoesNotFit with its table) before memory is taken.

    What takes a while is noted in `startup`, by default from here on. Without `reads_text` it has
    no tokenizer and no chat template, and their files are not opened, unless a draft model is
    asked for, whose vocabulary must be the same."""
    startup = startup or StartUp()
    check_settings(config)
    opened = open_model(config, progress, startup, reads_text=reads_text)
    if config.num_ranks == 1:
        return _driver(opened, None, progress, clock or WallClock(), startup)
    _decided(opened, None)  # what cannot be had starts no process
    check_cards(config, opened.device)
    ranks = start_ranks(config)
    ranks.whereabouts.memory = partial(held_bytes, opened.device)
    try:
        return _driver(opened, ranks, progress, clock or WallClock(), startup)
    except BaseException:
        ranks.close()
        raise


def _driver(
    opened: OpenModel,
    ranks: Ranks | None,
    progress: Progress | None,
    clock: Clock,
    startup: StartUp,
) -> Built:
    """Rank 0, and what there is once: decisions, scheduler, prices, the record of the run."""
    config, side, device = opened.config, opened.side, opened.device
    least = None
    if ranks is not None:
        with startup.phase("ranks"):
            least = open_ranks(ranks, config, device, opened.digest(), str(side.folder.path))
    with startup.phase("decisions"):
        resolved, memory, pricer = _decided(opened, least)
    log = None if config.event_log is None else LogFile(config.event_log)
    placement = Placement()
    if ranks is not None:
        with startup.phase("meeting of ranks"):
            placement = meet(ranks, resolved, config)
        progress = watching(ranks, progress)
    mine = build_rank(opened, resolved, placement, progress, startup)
    resolved, spec, executor = mine.resolved, side.spec, mine.executor
    scorer: Scorer | GroupScorer = mine.scorer
    memory = _measured(memory, mine)
    draft = _draft_source(resolved)
    controller = draft_length_controller(resolved, pricer, None if draft is None else draft.spec)
    if ranks is not None:
        with startup.phase("other ranks"):
            ranks.wait(messages.Built)
    warm_up = _warm_up(resolved, executor, controller, ranks, startup)
    learned = LearnedPricer(pricer)
    scheduler = _scheduler(resolved, spec, learned, controller)
    group = balance = None
    if ranks is not None:
        if config.expert_placement == "load":
            size = executor.experts[0].expert_bytes * (placement.for_experts.size // resolved.ep)
            price = exchange_price(pricer.setup, size)
            balance = ExpertBalance(executor.experts, executor.expert_load, price, clock)
        group = GroupExecutor(executor, ranks, placement.wave, balance)
        scorer = GroupScorer(mine.scorer, ranks)
    engine = Engine(scheduler, group or executor, clock, resolved.max_in_flight)
    draft_config = None if draft is None else read_config(draft.folder.path)
    model_config = read_config(side.folder.path)
    header = engine_header(resolved, scheduler, pricer, model_config, draft_config)
    run = _watched(engine, executor, header, pricer, learned, controller, log, balance)
    if ranks is not None:
        run.ranks = ranks.status
    built = Built(
        engine,
        scorer,
        spec,
        resolved,
        memory,
        device,
        side.tokenizer,
        side.chat_template,
        side.generation,
        run,
        pricer,
        log,
        startup.report(),
        opened.kernels,
        warm_up,
        ranks,
        None if no_grammars(resolved) else executor.grammars,
    )
    built.learn(side.tokenizer, side.generation.end_token_ids)
    return built


def no_grammars(resolved: ResolvedConfig) -> str:
    """Why no answer can be held to a grammar; "" where any can. The ranks that sample must hear
    of the masks from the first one, which knows the tokens of all rows."""
    if resolved.stages:
        return "the engine has a pipeline (pp above 1); use tp instead"
    return "ranks have rows of their own (dp above 1); use tp instead" if resolved.dp > 1 else ""


def _decided(
    opened: OpenModel, least: RankMemory | None
) -> tuple[ResolvedConfig, tuple[MemoryRow, ...], Pricer]:
    """What is done, what memory that takes, and what its steps should cost."""
    config, side, device = opened.config, opened.side, opened.device
    resolved, memory = resolve(
        config,
        side.spec,
        device,
        model_path=str(side.folder.path),
        model_name=side.folder.name,
        revision=side.folder.revision,
        has_weights=opened.checkpoint is not None,
        read_draft=lambda model: draft_source(model).spec,
        least=least,
    )
    pricer = engine_pricer(config, resolved, side.spec, device)
    return with_mixed_tokens(resolved, config.max_num_mixed_tokens, pricer), memory, pricer


def _warm_up(
    resolved: ResolvedConfig,
    executor: LocalExecutor,
    controller: DraftLengthController | None,
    ranks: Ranks | None,
    startup: StartUp,
) -> WarmUp | GroupWarmUp | None:
    if not resolved.warm_up:
        return None
    with startup.phase("warm-up") as opened:
        drafts = _foreseen_drafts(controller)
        alone = warm_up_of(resolved, executor, drafts, is_alone=ranks is None)
        warm_up = alone if ranks is None else GroupWarmUp(alone, ranks, drafts)
        warm_up.run(WARM_UP_S)
        opened.detail = warm_up.text()
    return warm_up


def warm_up_of(
    resolved: ResolvedConfig,
    executor: LocalExecutor,
    draft_tokens: Sequence[int] = (),
    *,
    is_alone: bool,
) -> WarmUp:
    """The same steps on every rank."""
    return WarmUp(
        executor,
        max_tokens=resolved.max_num_batched_tokens,
        max_mixed=resolved.max_num_mixed_tokens,
        draft_tokens=draft_tokens,
        can_give_up=is_alone,
    )


def _watched(
    engine: Engine,
    executor: LocalExecutor,
    header: EngineHeader,
    pricer: Pricer,
    learned: LearnedPricer,
    controller: DraftLengthController | None,
    log: LogFile | None,
    balance: ExpertBalance | None,
) -> RunRecord:
    """The record of the run, with who listens: the event log first, then what learns of steps."""
    if log is not None:
        recorder = Recorder(log.write, header, secrets.token_bytes(32), process_seconds)
        engine.listeners.append(recorder)
    run = RunRecord(header, pricer, cpu_s=process_seconds)
    run.expert_load = executor.expert_load.busiest
    if balance is not None:
        run.rank_load, run.num_exchanges = executor.expert_load.fullest, balance.done_so_far
    if engine.scheduler.policy.needs_promise:
        run.listeners.append(learned)
    if controller is not None:
        run.listeners.append(controller)
    engine.listeners.append(run)
    return run


def build_without_text(config: EngineConfig, progress: Progress | None = None) -> Built:
    """The server's engine: what a hostile tokenizer or template might do is done where it is
    bounded (ridgeline.server.text_process), and tells which token ends an answer if the model's
    configuration does not."""
    return build(config, progress, reads_text=False)


def _open(config: EngineConfig, path: Path, spec: ModelSpec) -> Checkpoint | None:
    is_empty = path.is_dir() and not any(path.iterdir())
    if config.load_format == "random" or is_empty:
        return None
    checkpoint = open_checkpoint(path, written=spec.written)
    if spec.implementation == NATIVE:
        check_model(checkpoint, spec, path)
    return checkpoint


def _decoder(
    resolved: ResolvedConfig,
    spec: ModelSpec,
    device: Device,
    checkpoint: Checkpoint | None,
    *,
    placement: Placement,
    packs: Packs | None,
    progress: Progress | None,
    startup: StartUp,
    min_token_ids: int = 0,
    who: str = "",
) -> Decoder:
    """`who` stands before the names of the phases."""
    if spec.implementation == TRANSFORMERS:
        return _foreign_decoder(resolved, spec, device, checkpoint, startup)
    with startup.phase(f"{who}allocation"):
        decoder = _empty_decoder(resolved, spec, device, placement, min_token_ids)
    if checkpoint is None or resolved.load_format == "random":
        with startup.phase(f"{who}weights") as opened:
            decoder.randomize(resolved.seed)
            device.synchronize()
            opened.detail = "random"
        return decoder
    served = _served(resolved, spec, placement, min_token_ids)
    key = "" if packs is None else pack_key(checkpoint, served)
    with startup.phase(f"{who}weights") as opened:
        begun = startup.elapsed_s()
        if packs is not None and (kept := packs.find(key)) is not None:
            decoder.adopt(kept)
            opened.detail = f"{scaled(decoder.num_bytes, 'B')}, packed at an earlier start"
            return decoder
        total = sum(checkpoint.num_bytes(name) for name in checkpoint.names())
        report = None if progress is None else lambda done: progress("weights", done, total)
        decoder.load(_source(checkpoint, device, resolved, spec), report)
        device.synchronize()
        seconds = max(1e-9, startup.elapsed_s() - begun)
        opened.detail = f"{scaled(total, 'B')}, {scaled(total / seconds, 'B/s')}"
        if isinstance(checkpoint, GGUFCheckpoint):
            opened.detail += f"; {checkpoint.became(resolved.dtype, resolved.weight_format)}"
    checkpoint.close()
    if packs is not None and decoder.is_packed:
        with startup.phase(f"keeping packed {who}weights") as opened:
            opened.detail = scaled(packs.keep(key, decoder.kept()), "B")
    return decoder


def _served(
    resolved: ResolvedConfig, spec: ModelSpec, placement: Placement, min_token_ids: int
) -> tuple[str, ...]:
    """All but the checkpoint that decides what the decoder's layers keep."""
    more = [str(min_token_ids)] if min_token_ids > spec.vocab_size else []
    if placement.size > 1:
        more.append(f"rank {placement.rank} of {placement.size}")
    every = placement.for_experts
    if every.size > 1:
        more.append(f"experts {every.rank} of {every.size}, ep {placement.ep}")
    return (__version__, resolved.dtype, resolved.weight_format, repr(spec), *more)


def _source(
    checkpoint: Checkpoint, device: Device, resolved: ResolvedConfig, spec: ModelSpec
) -> TensorSource:
    """On a CPU the copy out of the mapped file is all there is to do."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return checkpoint
    is_kept = resolved.weight_format == CHECKPOINT
    unpacked = unpacked_matrices(spec) if is_kept else matrix_schemes(spec)
    if unpacked:
        return UnpackedSource(checkpoint, unpacked)
    if device.torch_device.type == "cpu":
        return checkpoint
    return ParallelSource(checkpoint, device.torch_device)


def _empty_decoder(
    resolved: ResolvedConfig,
    spec: ModelSpec,
    device: Device,
    placement: Placement,
    min_token_ids: int,
) -> Decoder:
    dtype = getattr(torch, resolved.dtype)
    return Decoder(
        spec,
        dtype=dtype,
        device=device.torch_device,
        placement=placement,
        attention=choose_backend(
            resolved.attention_backend,
            spec,
            dtype,
            device.torch_device,
            resolved.kv_cache_dtype,
            deterministic=resolved.deterministic,
        ),
        weight_format=open_weight_format(
            resolved.weight_format, deterministic=resolved.deterministic
        ),
        max_model_len=resolved.max_model_len,
        deterministic=resolved.deterministic,
        min_token_ids=min_token_ids,
    )


def _foreign_decoder(
    resolved: ResolvedConfig,
    spec: ModelSpec,
    device: Device,
    checkpoint: Checkpoint | None,
    startup: StartUp,
) -> Decoder:
    """Of a model that Transformers' modules run. The checkpoint has been opened, and so checked."""
    from ridgeline.layers.transformers_model import TransformersDecoder

    dtype = getattr(torch, resolved.dtype)
    if checkpoint is not None:
        checkpoint.close()
    say(logger, logging.WARNING, "Transformers' modules compute the layers", family=spec.family,
        price="on a GPU steps take 4 to 40 times as long, most for small models")  # fmt: skip
    with startup.phase("weights"):
        decoder = TransformersDecoder(
            spec,
            Path(resolved.model_path),
            dtype=dtype,
            device=device.torch_device,
            attention=choose_backend(
                resolved.attention_backend,
                spec,
                dtype,
                device.torch_device,
                resolved.kv_cache_dtype,
            ),
            max_model_len=resolved.max_model_len,
        )
        is_random = checkpoint is None or resolved.load_format == "random"
        decoder.load_folder(is_random=is_random, seed=resolved.seed)
    return decoder


def _draft_source(resolved: ResolvedConfig) -> DraftSource | None:
    """The model that drafts; None where none does."""
    asked = asked_drafts(resolved)
    if asked is None or asked.line.argument != MODEL:
        return None
    return draft_source(asked.argument)


def _draft_decoder(
    config: EngineConfig,
    resolved: ResolvedConfig,
    source: DraftSource,
    min_token_ids: int,
    device: Device,
    packs: Packs | None,
    startup: StartUp,
) -> Decoder:
    """In the serving dtype, as its files are."""
    plain = structs.replace(config, load_format="auto")
    checkpoint = _open(plain, source.folder.path, source.spec)
    weight_format = CHECKPOINT if is_quantized(source.spec) else "auto"
    served = replace(resolved, load_format="auto", weight_format=weight_format)
    keeps = packs if device.name == "cpu" else None
    return _decoder(
        served,
        source.spec,
        device,
        checkpoint,
        placement=Placement(),
        packs=keeps,
        progress=None,
        startup=startup,
        min_token_ids=min_token_ids,
        who="draft ",
    )


def _cache(
    resolved: ResolvedConfig,
    spec: ModelSpec,
    groups: Sequence[KVGroup],
    device: Device,
    placement: Placement,
) -> KVCache:
    heads = placement.shard_heads(spec.layers[0].attention.num_kv_heads).length
    return KVCache(
        spec,
        groups,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        dtype=getattr(torch, resolved.dtype),
        device=device.torch_device,
        kv_format=resolved.kv_cache_dtype,
        num_kv_heads=heads if placement.size > 1 else None,
    )


def _why_not_captured(decoder: Decoder, kv: KVCache) -> str | None:
    """Here, or on another rank: its share may be one that no kernel takes."""
    reason, ranks = why_not_captured(decoder, kv), decoder.placement.collective
    if ranks is None or not ranks.captures:
        return reason
    others = ranks.all_gather(torch.tensor([reason is not None]))
    return reason or ("another rank cannot capture them" if any(map(bool, others)) else None)


def _executor(
    resolved: ResolvedConfig,
    device: Device,
    decoder: Decoder,
    kv: KVCache,
    drafting: Drafting | None,
    placement: Placement,
    why_not_captured: str | None,
) -> LocalExecutor:
    spec = decoder.spec
    captured, captured_tokens = resolved.max_captured_rows, resolved.max_captured_tokens
    if captured and why_not_captured:
        say(logger, logging.WARNING, "decode steps are not captured", reason=why_not_captured)
        captured = captured_tokens = 0
    if spec.layers[0].attention.num_kv_heads % decoder.placement.size:
        captured_tokens = 0  # ranks with fewer heads would find room for what others do not
    kind: Callable[..., LocalExecutor] = LocalExecutor if placement.wave is None else WaveExecutor
    if placement.pipeline is not None:
        kind = partial(StageExecutor, pipeline=placement.pipeline)
    return kind(
        decoder,
        kv,
        device,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        groups=kv.groups,
        vocab_size=decoder.spec.vocab_size,
        max_model_len=resolved.max_model_len,
        max_captured_rows=captured,
        max_captured_tokens=captured_tokens,
        deterministic=resolved.deterministic,
        drafting=drafting,
    )


def _scheduler(
    resolved: ResolvedConfig,
    spec: ModelSpec,
    pricer: StepPricer,
    controller: DraftLengthController | None,
) -> Scheduler:
    make = partial(
        BlockManager,
        resolved.num_blocks,
        resolved.block_size,
        windows=tuple(group.window for group in kv_groups(spec)),
        prefix_caching=resolved.prefix_caching,
        key=secrets.token_bytes(32),
    )
    blocks = open_pools(make, resolved.dp, resolved.max_num_batched_tokens)
    policy = make_policy(
        resolved.policy,
        PolicySetting(
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            num_cache_tokens=blocks.num_blocks * resolved.block_size,
            ttft_slo_s=resolved.ttft_slo_ms and resolved.ttft_slo_ms / 1e3,
            tpot_slo_s=resolved.tpot_slo_ms and resolved.tpot_slo_ms / 1e3,
            pricer=pricer,
        ),
    )
    asked = asked_drafts(resolved)
    return Scheduler(
        blocks,
        policy,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_num_seqs=resolved.max_num_seqs,
        max_num_mixed_tokens=resolved.max_num_mixed_tokens,
        num_drafts=resolved.max_draft_tokens,
        draft_lengths=controller,
        finds_drafts=asked is None or asked.line.looks_ahead,
        stages=max(1, len(resolved.stages)),
    )


def _foreseen_drafts(controller: DraftLengthController | None) -> tuple[int, ...]:
    """How many a step may check, the most useful number first: one that was asked for, then smaller
    ones, for steps of more rows."""
    if controller is None:
        return ()
    choices = [k for k in reversed(controller.choices) if k]
    if controller.fixed is not None:
        return tuple(choices)
    usual = [k for k in NUMBERS_OF_DRAFTS if k in choices]
    return (*usual, *(k for k in choices if k not in usual))


def _measured(memory: tuple[MemoryRow, ...], rank: Rank) -> tuple[MemoryRow, ...]:
    if rank.resolved.stages:
        return memory  # is that of the fullest stage
    got = {"weights": rank.decoder.num_bytes, "KV cache": rank.kv.num_bytes}
    if rank.drafting is not None and isinstance(rank.drafting.method, DraftModel):
        draft = rank.drafting.method
        got |= {"draft weights": draft.decoder.num_bytes, "draft cache": draft.kv.num_bytes}
    return tuple(replace(row, measured=got.get(row.what)) for row in memory)
