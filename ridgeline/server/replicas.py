"""How do several servers of one model run on this machine behind one address? `--replicas N`.

The process that was asked is the router. Each replica is a server of its own on a free port of the
loopback interface, which reads its settings from standard input and prints its address. Replicas
end with the router, after it has drained; one that ends by itself is started again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec
from msgspec import structs

from ridgeline import log
from ridgeline.asked import check_asked
from ridgeline.child import die_with_parent, environment
from ridgeline.clock import WallClock
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.log import say
from ridgeline.router.backend import replicas_wanted
from ridgeline.server.auth import KEY_VARIABLE, load_keys
from ridgeline.server.config import Listening, RouteConfig, ServeConfig, check_serve_numbers
from ridgeline.server.lifecycle import check_front, hardened, listen, serve, url_of, with_open_files
from ridgeline.server.outlet import Relay, never_block
from ridgeline.server.route import RouterDoors, RouterService, make_route_app
from ridgeline.server.service_manager import PRIVATE
from ridgeline.server.static_files import StaticPages

COMMAND = (sys.executable, "-m", "ridgeline.server.replicas")
HEALTHY_S = 60.0  # one that lived so long starts with a clean record
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
EXIT_WAIT_S = 8.0  # more than a server needs behind its drain deadline
POLL_S, SCALE_PERIOD_S = 0.05, 0.5
EXIT_CONFIG = 2  # what was asked for cannot be had

logger = logging.getLogger(__name__)


class Replica(ABC):
    """A server of its own, wherever it runs: started once."""

    @abstractmethod
    async def start(self, port: int) -> str:
        """Its address, as soon as it listens, at that port if there is a choice; empty when it
        ended before."""

    @abstractmethod
    async def wait(self) -> int:
        """Its exit code, once it has ended."""

    @abstractmethod
    def stop(self) -> None:
        """It finishes what it has and ends."""

    @abstractmethod
    def kill(self) -> None:
        """It ends now."""

    @abstractmethod
    def leave(self) -> None:
        """It has ended and no other takes its place."""


def serve_replicas(config: ServeConfig, on_listening: Callable[[str], None] | None = None) -> int:
    """Serve until told to stop; the exit code. Raises ConfigError."""
    never_block()
    check_serve_numbers(config)
    check_asked(config.engine)
    if config.engine.launcher == "join":
        raise ConfigError("launcher is of one engine; leave it out, or replicas")
    key = own_key(config)

    def fleet(service: RouterService) -> Fleet:
        return Fleet(service, config, lambda number: LocalReplica(config, number, key))

    return serve_fleet(config, key, fleet, on_listening)


def serve_fleet(
    config: ServeConfig,
    key: str | None,
    fleet: Callable[[RouterService], Fleet],
    on_listening: Callable[[str], None] | None,
) -> int:
    """A router and its replicas. Raises ConfigError."""
    for name, is_asked in (("lab", config.lab), ("admin_port", config.admin_port is not None)):
        if is_asked:
            raise ConfigError(f"{name} is of one engine; leave it out, or replicas")
    common = {name: getattr(config, name) for name in Listening.__struct_fields__}
    common["limits"] = with_open_files(config.limits)
    check_front(config)
    route = RouteConfig(backends=(), **common)
    with hardened(), listen(config.host, config.port) as sock:
        service = RouterService(route, WallClock(), key)
        pages = StaticPages(has_chat=config.ui, has_lab=False)
        doors = fleet(service)
        doors.open(sock, make_route_app(service, route, pages), route)
        say(logger, logging.INFO, f"listening on {url_of(sock, route)}", replicas=config.replicas)
        if on_listening is not None:
            on_listening(url_of(sock, route))
        return doors.run_forever()


def own_key(config: ServeConfig) -> str | None:
    """What the router and its replicas say to each other, where there are keys at all."""
    given = os.environ.get(KEY_VARIABLE)
    if given or not load_keys(config.api_key_file, None):
        return given
    return secrets.token_hex(24)


class Fleet(RouterDoors):
    """The router's, with its replicas: as many as are needed, each started again when it ends, one
    after the other on SIGHUP."""

    def __init__(
        self, service: RouterService, config: ServeConfig, make: Callable[[int], Replica]
    ) -> None:
        """`make` gives a replica by number, again and again."""
        super().__init__(service)
        self._least, self._most = config.num_replicas
        self._window_s = config.need_window_s
        self._enough_since = service.clock.now()
        self._make = make
        self._replicas: dict[int, Replica] = {}
        self._urls: dict[int, str] = {}
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._leaving: set[int] = set()
        self._failure: int | None = None  # the exit code of one that cannot be started
        self._update: asyncio.Task[None] | None = None

    async def work(self) -> None:
        """Returns when there is nothing more to be done: a replica cannot be had as asked."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        async with asyncio.TaskGroup() as group:
            while self._failure is None:
                now = len(self._keepers) - len(self._leaving)
                need, wanted = self._wanted(now)
                if need is not None and wanted != now:
                    say(logger, logging.INFO, "replicas", wanted=wanted, now=now, need=need)
                while wanted > now:
                    number = next(n for n in count() if n not in self._keepers)
                    self._keepers[number] = group.create_task(self._keep(number))
                    now += 1
                if wanted < now:  # one at a time
                    number = max(self._keepers)
                    self._leaving.add(number)
                    group.create_task(self._give_up(number))
                await asyncio.sleep(SCALE_PERIOD_S)

    def _wanted(self, now: int) -> tuple[float | None, int]:
        """What is needed, and how many are wanted. Fewer only after a window in which they were
        enough, and one after the other."""
        if self._least == self._most:
            return None, self._least
        need, time = self._service.need(), self._service.clock.now()
        wanted = replicas_wanted(need, now, self._least, self._most)
        if wanted >= now or self._leaving:
            self._enough_since = time
        if time - self._enough_since < self._window_s:
            wanted = max(wanted, now)
        return need, wanted

    async def _keep(self, number: int) -> None:
        """One replica, started again whenever it ends."""
        pause_s, port = FIRST_PAUSE_S, 0
        while self._failure is None and number not in self._leaving:
            began = self._service.clock.now()
            port = await self._live(number, port) or port
            if self._service.clock.now() - began > HEALTHY_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _live(self, number: int, port: int) -> int:
        """From its start to its end; its port, once it is known."""
        replica = self._replicas[number] = self._make(number)
        url = await replica.start(port)
        if url:
            say(logger, logging.INFO, "replica", number=number, url=url)
            self._urls[number] = url
            self._service.add(url)
        code = await replica.wait()
        if url:
            self._service.remove(self._urls.pop(number))
        is_asked = number in self._leaving or code == 0
        level = logging.INFO if is_asked else logging.ERROR
        say(logger, level, "a replica ended", number=number, exit_code=code)
        if code == EXIT_CONFIG:
            self._failure = code
        return int(url.rpartition(":")[2]) if url else 0

    async def _drain_one(self, number: int) -> None:
        """It gets nothing new, finishes what it has, and is told to end."""
        service = self._service
        url = self._urls.get(number)
        backend = next((one for one in service.backends if one.url == url), None)
        if backend is not None:
            backend.is_leaving = True
            deadline = service.clock.now() + service.limits.drain_s
            while backend.open and service.clock.now() < deadline:
                await asyncio.sleep(POLL_S)
        self._replicas[number].stop()

    async def _give_up(self, number: int) -> None:
        await self._drain_one(number)
        await asyncio.wait((self._keepers[number],), timeout=EXIT_WAIT_S)
        self._replicas[number].kill()
        await asyncio.wait((self._keepers.pop(number),))
        self._replicas.pop(number).leave()
        self._leaving.discard(number)

    def _on_hangup(self) -> None:
        if self._update is None or self._update.done():
            self._update = asyncio.create_task(self._replace_all())

    async def _replace_all(self) -> None:
        """Each in turn, the next one when the one before is ready again: with new weights in the
        model's folder, or a new version of this package."""
        say(logger, logging.INFO, "replacing every replica", number=len(self._keepers))
        for number in sorted(self._keepers):
            if number not in self._urls:
                continue
            before = self._replicas[number]
            await self._drain_one(number)
            while number in self._keepers and not (
                self._replicas[number] is not before and self._is_ready(number)
            ):
                await asyncio.sleep(POLL_S)
        say(logger, logging.INFO, "every replica was replaced")

    def _is_ready(self, number: int) -> bool:
        url = self._urls.get(number)
        return any(one.is_up for one in self._service.backends if one.url == url)

    async def end_work(self) -> int:
        """Tell those that are left, and wait for them."""
        if self._update is not None:
            self._update.cancel()
        for replica in self._replicas.values():
            replica.stop()
        waits = [asyncio.create_task(one.wait()) for one in self._replicas.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=EXIT_WAIT_S)
            if late:
                self.kill()
                await asyncio.wait(late)
        for replica in self._replicas.values():
            replica.leave()
        return self._failure or 0

    def kill(self) -> None:
        for replica in self._replicas.values():
            replica.kill()


class LocalReplica(Replica):
    """A process of this machine."""

    def __init__(self, config: ServeConfig, number: int, key: str | None) -> None:
        self._config, self._number, self._key = config, number, key
        self._process: asyncio.subprocess.Process | None = None
        self._words = Relay()

    async def start(self, port: int) -> str:
        process = self._process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._words.writer,
            start_new_session=True,  # the terminal's Ctrl-C is for the router, which tells them
            env=self._environment(),
        )
        self._words.follow()
        if process.stdin is None or process.stdout is None:
            raise OSError("no pipes")
        process.stdin.write(msgspec.json.encode(self._settings(port)))
        process.stdin.close()
        return (await process.stdout.readline()).decode().strip()

    async def wait(self) -> int:
        if self._process is None:
            return 0
        try:
            return await self._process.wait()
        finally:
            if self._process.returncode is not None:
                self._words.end()

    def _environment(self) -> dict[str, str]:
        """Its devices or cores, if there are enough to have own ones."""
        config, env = self._config, environment(PRIVATE)
        if self._key is not None:
            env[KEY_VARIABLE] = self._key
        number, (num_replicas, _) = self._number, config.num_replicas
        may_choose, each = config.engine.device in ("auto", "cuda"), config.engine.num_ranks
        if may_choose and len(devices := gpus()) >= num_replicas * each:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[number * each : (number + 1) * each])
        elif config.engine.threads is None:
            num_cores = len(os.sched_getaffinity(0)) // (num_replicas * each)
            env.setdefault("OMP_NUM_THREADS", str(max(1, num_cores)))
        return env

    def _settings(self, port: int) -> ServeConfig:
        """Those that share a device share its memory."""
        engine, (num_replicas, _) = self._config.engine, self._config.num_replicas
        if len(gpus()) < num_replicas * engine.num_ranks:
            share = engine.memory_utilization / num_replicas
            engine = structs.replace(engine, memory_utilization=share)
        return of_replica(self._config, engine, "127.0.0.1", port)

    def stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Nothing was kept for another."""


def gpus() -> list[str]:
    """The GPUs that may be used."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [one for one in allowed.split(",") if one]
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted(numbers, key=int)


def of_replica(config: ServeConfig, engine: EngineConfig, host: str, port: int) -> ServeConfig:
    """The settings of one."""
    return structs.replace(
        config, engine=engine, host=host, port=port, replicas="1", ui=False,
        allow_anyone_on_the_network_without_a_key=False, access_log=False,
        ssl_certfile=None, ssl_keyfile=None, root_path="", allowed_origins=(),
    )  # fmt: skip


def _tell(url: str) -> None:
    sys.stdout.write(url + "\n")
    sys.stdout.flush()


def main() -> int:
    """One replica."""
    die_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServeConfig)
    log.set_up(config.log_level, config.log_format, access_log=config.access_log)
    try:
        return serve(config, on_listening=_tell)
    except ConfigError as fault:
        say(logger, logging.CRITICAL, "cannot be served as asked", reason=fault)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
