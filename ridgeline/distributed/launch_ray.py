"""How are the ranks of a group placed on the machines of a Ray cluster, and how do they end?

Ray places, starts and ends; plans, tokens and tensors go over our own sockets. A placement group
has a bundle for each stage of the pipeline, and a bundle lies on one machine, so ranks that share
layers are never apart. Each rank is an actor, which gets text and numbers alone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ridgeline.config import EngineConfig
from ridgeline.distributed.links import EXIT_S, SECRET_BYTES, SECRET_VARIABLE, Processes, Ranks
from ridgeline.errors import ConfigError
from ridgeline.registry import opened

PLACE_S = 1.5  # for free resources to be given to us
KILL_S = 5.0
PREFIX = "ridgeline-ray-"
MOST_LETTERS = 32  # of the folder for temporary files: the paths of Ray's sockets have at most 107
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; nothing of ours is kept there
WORKER = "ridgeline.worker:join"
LOOPBACK = "127.0.0.1"
MOST_WORDS = 300  # characters of what Ray says

Resources = Mapping[str, float]


# ----------------------------------------------------------------------------- the cluster


class Cluster:
    """The connection to Ray: the caller's own, to a cluster that runs, or to one on this machine
    that is started now and ends with us. ConfigError when Ray is not installed or not reached."""

    def __init__(self, num_cpus: int) -> None:
        """`num_cpus`: that a cluster of our own must have; on one machine they are a mere count."""
        if find_spec("ray") is None:
            raise ConfigError("launcher ray needs Ray: pip install 'ridgeline[ray]'")
        self.ray: Any = import_module("ray")
        self._is_ours = not self.ray.is_initialized()
        self.folder: str | None = None
        if not self._is_ours:
            return
        try:
            self.ray.init(address="auto", log_to_driver=True, logging_level="WARNING")
        except ConnectionError as fault:
            if "RAY_ADDRESS" in os.environ:
                raise ConfigError(f"RAY_ADDRESS {os.environ['RAY_ADDRESS']}: {fault}") from None
            self._start(num_cpus)

    def _start(self, num_cpus: int) -> None:
        is_short = len(tempfile.gettempdir()) <= MOST_LETTERS
        self.folder = tempfile.mkdtemp(prefix=PREFIX, dir=None if is_short else "/tmp")
        self.ray.init(
            address="local",
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level="WARNING",
            _temp_dir=self.folder,
        )
        os.chmod(self.folder, 0o700)  # Ray opens it to everybody

    def close(self) -> None:
        """What was ours ends."""
        if self._is_ours:
            self.ray.shutdown()
        self.remove_files()

    def remove_files(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def nodes(self) -> dict[str, Resources]:
        """What each machine has, by address and Ray's port there."""
        found = (node for node in self.ray.nodes() if node["Alive"])
        return {
            f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}": node["Resources"]
            for node in found
        }

    @property
    def own_host(self) -> str:
        """The address of this machine that the others reach."""
        return LOOPBACK if len(self.nodes()) == 1 else node_address()

    def has_gpu(self, config: EngineConfig) -> bool:
        """Whether ranks run on GPUs."""
        is_free = config.device == "auto"
        return config.device == "cuda" or (is_free and self.ray.cluster_resources().get("GPU", 0))


def node_address() -> str:
    """Of this machine, as Ray knows it."""
    return str(import_module("ray.util").get_node_ip_address())


def unit_of(config: EngineConfig, *, on_gpu: bool) -> Resources:
    """What one rank takes."""
    return {"CPU": float(config.threads or 1)} | ({"GPU": 1.0} if on_gpu else {})


def why_not(bundle: Resources, number: int, nodes: Mapping[str, Resources]) -> str:
    """Why so many bundles can never be placed on these machines; empty when they can."""
    room = sum(
        min(int(has.get(name, 0) / amount) for name, amount in bundle.items())
        for has in nodes.values()
    )
    if room >= number:
        return ""
    have = "; ".join(f"{name}: {_words(has, bundle)}" for name, has in sorted(nodes.items()))
    times = f"{number} times " if number > 1 else ""
    return f"{times}{_words(bundle, bundle)} of one machine is asked for, and Ray has {have}"


def _words(resources: Resources, names: Sequence[str] | Resources) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in names)


class Placed:
    """A placement group. ConfigError at once when no machines could ever hold it, and after
    `wait_s` when they are taken by others."""

    def __init__(
        self, cluster: Cluster, unit: Resources, widths: Sequence[int], wait_s: float = PLACE_S
    ) -> None:
        """`widths`: ranks of each stage; each takes a `unit`."""
        self._ray = cluster.ray
        self._groups: Any = import_module("ray.util.placement_group")
        self._strategies: Any = import_module("ray.util.scheduling_strategies")
        widest = {name: max(widths) * amount for name, amount in unit.items()}
        if reason := why_not(widest, len(widths), cluster.nodes()):
            raise ConfigError(
                f"{reason}; ask for fewer ranks, or add machines (ray start --address=HOST:PORT)"
            )
        self._unit = unit
        bundles = [{name: width * amount for name, amount in unit.items()} for width in widths]
        self._group = self._groups.placement_group(bundles, strategy="PACK")
        if not self._group.wait(wait_s):
            free = _words(self._ray.available_resources(), unit)
            self.remove()
            raise ConfigError(
                f"{len(widths)} times {_words(widest, unit)} of one machine is not free within"
                f" {wait_s:g} s; free in all of Ray now: {free}; wait for other work to end, or"
                " ask for fewer ranks"
            )

    def actor(self, kind: type, stage: int) -> Any:
        """One more, on the machine of that stage."""
        strategy = self._strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=stage
        )
        made = self._ray.remote(kind).options(
            num_cpus=self._unit["CPU"],
            num_gpus=self._unit.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        return made.remote()

    def remove(self) -> None:
        """With the actors in it."""
        self._groups.remove_placement_group(self._group)


class RankActor:
    """A rank, in a process of Ray's."""

    def run(self, host: str, port: int, secret: str, rank: int) -> int:
        """Obey until the driver is gone."""
        os.environ[SECRET_VARIABLE] = secret
        code: int = opened(WORKER)(host, port, rank)
        return code


# ------------------------------------------------------------------------ one group of ranks


class RayProcesses(Processes):
    """Ranks 1 .. size - 1 as actors; rank 0 is here."""

    how = "see Ray's log of that actor"

    def __init__(self, config: EngineConfig, secret: bytes) -> None:
        self._cluster = cluster = Cluster(config.num_ranks * (config.threads or 1))
        self._placed: Placed | None = None
        self._actors: list[Any] = []
        try:
            if cluster.has_gpu(config):
                raise ConfigError(
                    "with launcher ray on GPUs, every rank is placed by Ray: use `ridgeline serve`;"
                    " ranks beside this process are started by launcher local or join"
                )
            self.host = cluster.own_host
            widths = [config.tp] * config.pp
            self._placed = placed = Placed(cluster, unit_of(config, on_gpu=False), widths)
            self.listener = socket.create_server((self.host, 0))
            port = self.listener.getsockname()[1]
            ranks = range(1, config.num_ranks)
            self._actors = [placed.actor(RankActor, rank // config.tp) for rank in ranks]
            self._ends = [
                actor.run.remote(self.host, port, secret.hex(), rank)
                for rank, actor in zip(ranks, self._actors, strict=True)
            ]
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        ray = self._cluster.ray
        if self._placed is None:
            self._cluster.close()
            return
        for actor in self._actors:
            ray.kill(actor)
        ray.wait(self._ends, num_returns=len(self._ends), timeout=KILL_S)
        self._placed.remove()
        self._placed = None
        self._cluster.close()

    def last_words(self, rank: int) -> str:
        return self._words(rank, EXIT_S) or "it closed its socket"

    def early_end(self) -> str:
        words = ((rank, self._words(rank, 0.0)) for rank in range(1, len(self._ends) + 1))
        return "; ".join(f"rank {rank}: {said}" for rank, said in words if said)

    def _words(self, rank: int, wait_s: float) -> str:
        """What Ray says of the end of one; empty when it has not ended."""
        ray = self._cluster.ray
        try:
            return f"exit code {ray.get(self._ends[rank - 1], timeout=wait_s)}"
        except ray.exceptions.GetTimeoutError:
            return ""
        except ray.exceptions.RayError as error:
            words = str(getattr(error, "cause", None) or error).split()
            return " ".join(words)[:MOST_WORDS]


def launch(config: EngineConfig) -> Ranks:
    """All of them but rank 0. Raises ConfigError."""
    secret = secrets.token_bytes(SECRET_BYTES)
    processes = RayProcesses(config, secret)
    return Ranks(config.num_ranks, secret, processes=processes, listener=processes.listener)
