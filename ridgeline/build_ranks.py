"""How do the other ranks of a group come to be ready, as the driver sees it?"""

from __future__ import annotations

import mmap
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import torch
from msgspec import structs

from ridgeline.asked import read_address
from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.devices import Device
from ridgeline.distributed.agreement import Agreement
from ridgeline.distributed.collectives import open_collective
from ridgeline.distributed.gloo import nobody_knows, own_host
from ridgeline.distributed.links import Processes, Ranks, read_secret
from ridgeline.distributed.messages import (
    Build,
    Open,
    Opened,
)
from ridgeline.distributed.pipeline import Pipeline
from ridgeline.distributed.placement import Collective, Placement
from ridgeline.distributed.wave import Wave
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.registry import opened
from ridgeline.resolve import RankMemory, memory_of

COLLECTIVE_S = 600.0  # the driver ends the group long before, if a rank waits for another in vain
TURN_S = 0.2
PIPELINE = "gloo"  # how stages talk
MOST_LETTERS = 80  # of an address


def check_cards(config: EngineConfig, device: Device) -> None:
    """Raises ConfigError where ranks that are started on this machine have not a GPU each."""
    if config.launcher_line.is_here and device.name != "cpu":
        cards = torch.cuda.device_count()
        if cards < config.num_ranks:
            raise ConfigError(
                f"launcher local starts all {config.num_ranks} ranks on this machine, where each"
                f" needs a GPU and there are {cards}; ask for fewer ranks, or use launcher join,"
                " or `ridgeline serve --launcher ray`, with ranks on other machines"
            )


def start_ranks(config: EngineConfig) -> Ranks:
    """Start them, or listen to those that others start. Raises ConfigError."""
    started: Ranks = opened(config.launcher_line.where)(config)
    return started


class JoiningProcesses(Processes):
    def __init__(self, address: str) -> None:
        self.host, self.port = read_address(address)
        self.how = f"start `ridgeline worker --join {address}` for each of them"


def let_join(config: EngineConfig) -> Ranks:
    """Somebody else starts them. Raises ConfigError."""
    secret = read_secret()
    processes = JoiningProcesses(config.join_address or "")
    try:
        listener = socket.create_server((processes.host, processes.port))
    except OSError as error:
        raise ConfigError(
            f"join_address {config.join_address} cannot be listened on ({error.strerror}); give an"
            " address of this machine and a free port"
        ) from None
    return Ranks(config.num_ranks, secret, processes=processes, listener=listener)


def open_ranks(
    ranks: Ranks, config: EngineConfig, device: Device, digest: str, path: str
) -> RankMemory:
    """Have each of them find the model and its device; the memory of the one that has least, of
    those that share a machine's memory a share each. Raises ConfigError."""
    ranks.gather(ranks.processes.wait_s, ranks.processes.how)
    kind = device.name.partition(":")[0]
    theirs = structs.replace(
        config,
        device=kind,
        model=path if config.launcher_line.is_here else config.model,
        pack_cache="off" if config.pack_cache == "off" else "auto",  # cleared once
    )
    ranks.send(Open(theirs))
    own = memory_of(device)
    every = [
        Opened(device.name, hardware_of(device), own.total, own.free, digest),
        *ranks.wait(Opened),
    ]
    hosts = ranks.hosts()
    places = [(host, one.hardware) for host, one in zip(hosts, every, strict=True)]
    sharing = Counter(places)
    found = []
    for rank, (one, place) in enumerate(zip(every, places, strict=True)):
        if one.digest != digest:
            raise ConfigError(
                f"{ranks.words(rank)} has other weights or another configuration of the model than"
                " rank 0; give all ranks the same files"
            )
        if kind != "cpu" and sharing[place] > 1:
            raise ConfigError(
                f"{ranks.words(rank)} uses {one.device}, which another rank uses too; give each"
                " rank a GPU of its own, for example by CUDA_VISIBLE_DEVICES"
            )
        share = sharing[place]
        bound = own.bound if share == 1 else f"{share} ranks share the memory of this machine"
        found.append(RankMemory(one.total // share, one.free // share, bound))
    return min(found, key=lambda one: one.free)


def hardware_of(device: Device) -> str:
    """Which one of all GPUs it is; a CPU is the machine's."""
    if device.name == "cpu":
        return device.name
    return str(torch.cuda.get_device_properties(device.torch_device).uuid)


def held_bytes(device: Device) -> int:
    """Bytes of memory of the device that this process holds; never asks a driver, which may hang
    just when somebody wants to know."""
    if device.name == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return int(torch.cuda.memory_reserved(device.torch_device))


def meet(ranks: Ranks, resolved: ResolvedConfig, config: EngineConfig) -> Placement:
    """Have all ranks build their shares, and meet them. A rank that fails ends the waiting."""
    host = ranks.processes.host
    listener = socket.create_server((host, 0))
    address = f"{host}:{listener.getsockname()[1]}"
    ranks.send(Build(resolved, address))
    placement: list[Placement] = []
    problem: list[RidgelineError] = []

    def work() -> None:
        try:
            placement.append(
                rank_placement(
                    ranks.whereabouts.follow, resolved, 0, address, listener, ranks.check
                )
            )
        except RidgelineError as error:
            problem.append(error)

    thread = Thread(target=work, name="meeting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(TURN_S)
        ranks.check()
    if problem:
        raise problem[0]
    ranks.agreement = Agreement(groups_of(resolved))
    wave = placement[0].wave
    every = placement[0].collective, None if wave is None else wave.collective
    found = [collective for collective in every if collective is not None]

    def abandon() -> None:
        for collective in found:
            collective.abandon()

    ranks.abandon = abandon
    return placement[0]


def groups_of(resolved: ResolvedConfig) -> list[list[int]]:
    """Ranks that have the same tokens. Stages between the first and the last have none."""
    width, stages = resolved.tp, len(resolved.stages)
    if stages > 1:
        return [[*range(width), *range((stages - 1) * width, stages * width)]]
    return [list(range(at * width, (at + 1) * width)) for at in range(resolved.dp)]


def rank_placement(
    follow: Callable[[Collective], Collective],
    resolved: ResolvedConfig,
    rank: int,
    address: str,
    listener: socket.socket | None = None,
    alive: Callable[[], None] = nobody_knows,
) -> Placement:
    """Of a rank that has met the others."""
    width, stages, dp, ep = resolved.tp, len(resolved.stages), resolved.dp, resolved.ep
    groups = dp * max(1, stages)  # of ranks that share every layer
    every = open_collective(
        PIPELINE if stages else resolved.collective,
        rank,
        groups * width,
        address,
        listener=listener,
        timeout_s=COLLECTIVE_S,
        alive=alive,
    )
    follow(every)
    if groups == 1:
        return Placement(rank, width, every, ep)
    pipeline = Pipeline(every, rank, stages, width) if stages else None
    wave = Wave(every, rank, dp, width) if dp > 1 else None
    group, place = divmod(rank, width)
    if width == 1:
        return Placement(ep=ep, pipeline=pipeline, wave=wave)
    own = None
    if place == 0:
        own = socket.create_server((own_host(address), 0))
    where = _addresses(every, own)[group * width]
    found = open_collective(
        resolved.collective,
        place,
        width,
        where,
        listener=own,
        timeout_s=COLLECTIVE_S,
        alive=alive,
    )
    return Placement(place, width, follow(found), ep, pipeline, wave)


def _addresses(every: Collective, own: socket.socket | None) -> list[str]:
    """Where the first rank of each group waits for the others of it; by rank, "" of all others."""
    host, port = ("", 0) if own is None else own.getsockname()[:2]
    text = f"{host}:{port}".encode() if host else b""
    told = every.all_gather(torch.tensor(list(text.ljust(MOST_LETTERS)), dtype=torch.uint8))
    return [bytes(one.tolist()).decode().strip() for one in told]


def watching(
    ranks: Ranks, progress: Callable[[str, int, int], None] | None
) -> Callable[[str, int, int], None]:
    """`progress` of what takes long here, which ends as soon as another rank has ended."""

    def told(stage: str, done: int, total: int) -> None:
        ranks.check()
        if progress is not None:
            progress(stage, done, total)

    return told
