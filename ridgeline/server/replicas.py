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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import structs

from ridgeline import log
from ridgeline.asked import check_asked
from ridgeline.child import die_with_parent, environment
from ridgeline.clock import WallClock
from ridgeline.errors import ConfigError
from ridgeline.log import say
from ridgeline.server.auth import KEY_VARIABLE, load_keys
from ridgeline.server.config import Listening, RouteConfig, ServeConfig, check_serve_numbers
from ridgeline.server.lifecycle import hardened, listen, serve, url_of, with_open_files
from ridgeline.server.outlet import Relay, never_block
from ridgeline.server.route import RouterDoors, RouterService, make_route_app
from ridgeline.server.service_manager import PRIVATE
from ridgeline.server.static_files import StaticPages

COMMAND = (sys.executable, "-m", "ridgeline.server.replicas")
HEALTHY_S = 60.0  # one that lived so long starts with a clean record
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
EXIT_WAIT_S = 8.0  # more than a server needs behind its drain deadline
EXIT_CONFIG = 2  # what was asked for cannot be had

logger = logging.getLogger(__name__)


def serve_replicas(config: ServeConfig, on_listening: Callable[[str], None] | None = None) -> int:
    """Serve until told to stop; the exit code. Raises ConfigError."""
    never_block()
    check_serve_numbers(config)
    check_asked(config.engine)
    joins = config.engine.launcher == "join"
    own = (("lab", config.lab), ("admin_port", config.admin_port is not None), ("launcher", joins))
    for name, is_asked in own:
        if is_asked:
            raise ConfigError(f"{name} is of one engine; leave it out, or replicas")
    common = {name: getattr(config, name) for name in Listening.__struct_fields__}
    common["limits"] = with_open_files(config.limits)
    route = RouteConfig(backends=(), **common)
    own_key = _own_key(config)
    with hardened(), listen(config.host, config.port) as sock:
        service = RouterService(route, WallClock(), own_key)
        pages = StaticPages(has_chat=config.ui, has_lab=False)
        doors = _Doors(service, config)
        doors.open(sock, make_route_app(service, route, pages))
        say(logger, logging.INFO, f"listening on {url_of(sock)}", replicas=config.replicas)
        if on_listening is not None:
            on_listening(url_of(sock))
        return doors.run_forever()


def _own_key(config: ServeConfig) -> str | None:
    """What the router and its replicas say to each other, where there are keys at all."""
    given = os.environ.get(KEY_VARIABLE)
    if given or not load_keys(config.api_key_file, None):
        return given
    return secrets.token_hex(24)


class _Doors(RouterDoors):
    """The router's, with its replicas."""

    def __init__(self, service: RouterService, config: ServeConfig) -> None:
        super().__init__(service)
        self._config = config
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._failure: int | None = None  # the exit code of one that cannot be started

    async def work(self) -> None:
        """Returns when there is nothing more to be done: a replica cannot be had as asked."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._config.replicas):
                group.create_task(self._keep(number))

    async def _keep(self, number: int) -> None:
        """One replica, started again whenever it ends."""
        pause_s, port = FIRST_PAUSE_S, 0
        while True:
            began = self._service.clock.now()
            port = await self._live(number, port) or port
            if self._failure is not None:
                return
            if self._service.clock.now() - began > HEALTHY_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _live(self, number: int, port: int) -> int:
        """From its start to its end; its port, once it is known."""
        words = Relay()
        process = self._processes[number] = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=words.writer,
            start_new_session=True,  # the terminal's Ctrl-C is for the router, which tells them
            env=self._environment(number),
        )
        words.follow()
        if process.stdin is None or process.stdout is None:
            raise OSError("no pipes")
        process.stdin.write(msgspec.json.encode(_of_replica(self._config, port)))
        process.stdin.close()
        try:
            url = (await process.stdout.readline()).decode().strip()
            if url:
                say(logger, logging.INFO, "replica", number=number, pid=process.pid, url=url)
                self._service.add(url)
            code = await process.wait()
        finally:
            if process.returncode is not None:
                words.end()
        say(logger, logging.ERROR, "a replica ended", number=number, exit_code=code)
        if code == EXIT_CONFIG:
            self._failure = code
        return int(url.rpartition(":")[2]) if url else 0

    def _environment(self, number: int) -> dict[str, str]:
        """Its devices or cores, if there are enough to have own ones."""
        config, env = self._config, environment(PRIVATE)
        if (key := self._service.own_key) is not None:
            env[KEY_VARIABLE] = key
        may_choose, each = config.engine.device in ("auto", "cuda"), config.engine.num_ranks
        if may_choose and len(devices := gpus()) >= config.replicas * each:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[number * each : (number + 1) * each])
        elif config.engine.threads is None:
            num_cores = len(os.sched_getaffinity(0)) // (config.replicas * each)
            env.setdefault("OMP_NUM_THREADS", str(max(1, num_cores)))
        return env

    async def end_work(self) -> int:
        """Tell those that are left, and wait for them."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.terminate()
        waits = [asyncio.create_task(process.wait()) for process in self._processes.values()]
        _, late = await asyncio.wait(waits, timeout=EXIT_WAIT_S)
        if late:
            self.kill()
            await asyncio.wait(late)
        return self._failure or 0

    def kill(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def gpus() -> list[str]:
    """The GPUs that may be used."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [one for one in allowed.split(",") if one]
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted(numbers, key=int)


def _of_replica(config: ServeConfig, port: int) -> ServeConfig:
    """The settings of one. Those that share a device share its memory."""
    engine = config.engine
    if len(gpus()) < config.replicas * engine.num_ranks:
        share = engine.memory_utilization / config.replicas
        engine = structs.replace(engine, memory_utilization=share)
    return structs.replace(
        config, engine=engine, host="127.0.0.1", port=port, replicas=1, ui=False,
        allow_anyone_on_the_network_without_a_key=False, access_log=False,
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
