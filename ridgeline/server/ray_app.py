"""How do replicas on the machines of a Ray cluster run behind one address? `--launcher ray`.

The process that was asked is the router, here as everywhere. A replica is a placement group: an
actor that runs the ordinary server as a process of its own, and one for each further rank, which
joins it. Ray places them and tells of ends; requests go to the servers by plain HTTP. The end of
any part is the end of the replica, which is then started again in its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from threading import Timer
from typing import Any

import msgspec
from msgspec import structs

from ridgeline.asked import check_asked
from ridgeline.child import environment
from ridgeline.distributed.launch_ray import (
    KILL_S,
    LOOPBACK,
    Cluster,
    Placed,
    RankActor,
    Resources,
    node_address,
    unit_of,
)
from ridgeline.distributed.links import SECRET_BYTES, SECRET_VARIABLE
from ridgeline.errors import ConfigError
from ridgeline.log import say
from ridgeline.server.auth import KEY_VARIABLE
from ridgeline.server.config import ServeConfig, check_serve_numbers
from ridgeline.server.outlet import drain, never_block
from ridgeline.server.replicas import COMMAND, Fleet, Replica, of_replica, own_key, serve_fleet
from ridgeline.server.route import RouterService
from ridgeline.server.service_manager import PRIVATE

TURN_S = 1.0  # between two looks at the other ranks
END_S = 20.0  # for all replicas to end, and Ray with them
EXIT_SIGNAL = 128  # and its number
EXIT_LOST = 70  # EX_SOFTWARE: a part of it is gone
EXIT_NO_PLACE = 75  # EX_TEMPFAIL

logger = logging.getLogger(__name__)


def serve_on_ray(config: ServeConfig, on_listening: Callable[[str], None] | None = None) -> int:
    """Serve until told to stop; the exit code. Raises ConfigError, also when the least number of
    replicas cannot be placed."""
    never_block()
    check_serve_numbers(config)
    engine = config.engine
    check_asked(structs.replace(engine, launcher="auto"))  # of one rank too
    least, most = config.num_replicas
    cluster = Cluster(most * engine.num_ranks * (engine.threads or 1))
    try:
        num_nodes = len(cluster.nodes())
        key = own_key(config)
        if num_nodes > 1 and key is None:
            raise ConfigError(
                f"replicas on {num_nodes} machines can be reached from the network and no API key"
                f" is set: set {KEY_VARIABLE}, or name a key file (api_key_file)"
            )
        unit = unit_of(engine, on_gpu=cluster.has_gpu(engine))
        if "GPU" not in unit:  # those of a machine share its memory
            share = engine.memory_utilization / -(-most // num_nodes)
            engine = structs.replace(engine, memory_utilization=share)
        config = structs.replace(config, engine=engine)
        widths = [engine.tp] * engine.pp
        places: dict[int, Placed] = {}
        for number in range(least):
            places[number] = Placed(cluster, unit, widths)

        def make(number: int) -> Replica:
            return RayReplica(cluster, config, number, key or "", unit, places)

        def fleet(service: RouterService) -> Fleet:
            return RayFleet(cluster, service, config, make)

        return serve_fleet(config, key, fleet, on_listening)
    finally:
        cluster.close()


class RayFleet(Fleet):
    """Ends in bounded time, also when Ray does not answer any more."""

    def __init__(
        self,
        cluster: Cluster,
        service: RouterService,
        config: ServeConfig,
        make: Callable[[int], Replica],
    ) -> None:
        super().__init__(service, config, make)
        self._cluster = cluster

    async def end_work(self) -> int:
        timer = Timer(END_S, self._end_anyway)
        timer.daemon = True
        timer.start()
        return await super().end_work()

    def _end_anyway(self) -> None:
        say(logger, logging.WARNING, "Ray does not answer; ending without it")
        self._cluster.remove_files()
        drain()
        os._exit(0)


class ServerActor:
    """A server and rank 0, in a process that one of Ray's has started. Bytes, text and numbers are
    all that comes here."""

    def serve(self, settings: bytes, key: str, secret: str, host: str) -> tuple[str, str]:
        """Its address, and where other ranks join it."""
        config = msgspec.json.decode(settings, type=ServeConfig)
        engine, meeting = structs.replace(config.engine, launcher="auto"), ""
        if engine.num_ranks > 1:
            with socket.create_server((host, 0)) as free:
                meeting = f"{host}:{free.getsockname()[1]}"
            engine = structs.replace(engine, launcher="join", join_address=meeting)
        config = of_replica(config, engine, host, 0)
        if meeting:  # without its ranks it is of no use, and they are not started again alone
            config = structs.replace(
                config, limits=structs.replace(config.limits, max_engine_restarts=0)
            )
        env = environment(PRIVATE) | {SECRET_VARIABLE: secret}
        if key:
            env[KEY_VARIABLE] = key
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise OSError("no pipes")
        self._process.stdin.write(msgspec.json.encode(config))
        self._process.stdin.close()
        return self._process.stdout.readline().decode().strip(), meeting

    def host(self) -> str:
        """The address of the machine."""
        return node_address()

    def wait(self, seconds: float) -> int:
        """Its exit code, -1 while it runs."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(seconds)
            return code if code >= 0 else EXIT_SIGNAL - code
        return -1

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)


class RayReplica(Replica):
    def __init__(
        self,
        cluster: Cluster,
        config: ServeConfig,
        number: int,
        key: str,
        unit: Resources,
        places: dict[int, Placed],
    ) -> None:
        """`places`: those of all replicas by number; one that is started again has it still."""
        self._cluster, self._config, self._number, self._key = cluster, config, number, key
        self._unit, self._places = unit, places
        self._actors: list[Any] = []
        self._ends: list[Any] = []

    async def start(self, port: int) -> str:
        """At a port of the machine's choice."""
        try:
            return await asyncio.to_thread(self._start)
        except ConfigError as error:
            say(logger, logging.WARNING, "a replica has no place", number=self._number, why=error)
        except self._cluster.ray.exceptions.RayError as error:
            self._say_end(error)
        return ""

    def _start(self) -> str:
        ray, engine = self._cluster.ray, self._config.engine
        if self._number not in self._places:
            widths = [engine.tp] * engine.pp
            self._places[self._number] = Placed(self._cluster, self._unit, widths)
        placed = self._places[self._number]
        server = placed.actor(ServerActor, 0)
        self._actors = [server]
        is_alone = len(self._cluster.nodes()) == 1
        host = LOOPBACK if is_alone else ray.get(server.host.remote())
        secret = secrets.token_hex(SECRET_BYTES)
        settings = msgspec.json.encode(self._config)
        url, meeting = ray.get(server.serve.remote(settings, self._key, secret, host))
        for rank in range(1, engine.num_ranks):
            actor = placed.actor(RankActor, rank // engine.tp)
            self._actors.append(actor)
            where, _, joins = meeting.rpartition(":")
            self._ends.append(actor.run.remote(where, int(joins), secret, rank))
        return str(url)

    async def wait(self) -> int:
        """When any part of it has ended, all of it has."""
        code = EXIT_NO_PLACE
        if self._actors:
            try:
                code = await self._wait()
            except self._cluster.ray.exceptions.RayError as error:
                self._say_end(error)
                code = EXIT_LOST
        await asyncio.to_thread(self._end)
        return code

    async def _wait(self) -> int:
        ray, server = self._cluster.ray, self._actors[0]
        while True:
            code: int = await asyncio.wrap_future(server.wait.remote(TURN_S).future())
            if code >= 0:
                return code
            if ended := ray.wait(self._ends, timeout=0)[0] if self._ends else []:
                ray.get(ended[0])
                return EXIT_LOST

    def _end(self) -> None:
        ray, self._actors, actors = self._cluster.ray, [], self._actors
        for actor in actors:
            ray.kill(actor)
        if self._ends:
            ray.wait(self._ends, num_returns=len(self._ends), timeout=KILL_S)

    def _say_end(self, error: Exception) -> None:
        words = " ".join(str(error).split())
        say(logger, logging.ERROR, "Ray tells of an end", number=self._number, why=words)

    def stop(self) -> None:
        if self._actors:
            self._actors[0].stop.remote()

    def kill(self) -> None:
        for actor in self._actors:
            self._cluster.ray.kill(actor)

    def leave(self) -> None:
        if (placed := self._places.pop(self._number, None)) is not None:
            placed.remove()
