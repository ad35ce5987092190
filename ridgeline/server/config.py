"""What may an operator ask of the server?"""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.config import EngineConfig, Range, check_numbers, check_ranges

DEFAULT_BUILDER = "ridgeline.build:build_without_text"

# What is below the least here would refuse everybody, or let the server end or kill what is well.
MOMENT_S = 0.1  # who has waited too long is looked for a few times a second
FOREVER_S = 1e9  # thirty years; timers do not take any number
SMALL_BYTES = 1 << 10  # the head of a plain request has some hundred bytes
MANY_BYTES = 1 << 40
MANY = 1 << 30
LIMIT_RANGES: tuple[Range, ...] = (
    ("max_body_bytes", SMALL_BYTES, MANY_BYTES),
    ("max_header_bytes", SMALL_BYTES, MANY_BYTES),
    ("max_headers", 8, MANY),  # ordinary clients send so many
    ("max_json_depth", 1, 512),  # the parser calls itself for each level
    ("max_connections", 1, MANY),
    ("max_sequences_per_request", 1, MANY),
    ("max_queued_sequences", 0, MANY),  # 0: who cannot run at once is refused
    ("max_queued_cache_fills", 0.1, 1e9),
    ("max_held_body_bytes", SMALL_BYTES, MANY_BYTES),
    ("max_sequences_per_key", 0, MANY),  # 0: as many as the server holds, but for a part
    ("max_stream_bytes", SMALL_BYTES, MANY_BYTES),
    ("header_timeout_s", MOMENT_S, FOREVER_S),
    ("body_timeout_s", MOMENT_S, FOREVER_S),
    ("idle_connection_timeout_s", 0, int(FOREVER_S)),  # 0: a connection is for one request
    ("queue_timeout_s", MOMENT_S, FOREVER_S),
    ("run_timeout_s", MOMENT_S, FOREVER_S),
    ("write_timeout_s", MOMENT_S, FOREVER_S),
    ("keepalive_s", MOMENT_S, FOREVER_S),
    ("drain_s", 0.0, FOREVER_S),  # 0: running answers are not waited for
    ("step_overdue_multiple", 1.0, 1e9),
    ("step_overdue_s", 0.0, FOREVER_S),  # 0: only the multiple counts
    ("step_deadline_s", MOMENT_S, FOREVER_S),
    ("step_kill_s", MOMENT_S, FOREVER_S),
    ("first_step_kill_s", MOMENT_S, FOREVER_S),
    ("max_engine_restarts", 0, 100),  # the pause before each is twice the last one
    ("tokenizer_processes", 1, 1024),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client, or all together, may cost. Bytes, seconds and counts as the names say.

    Nothing here adjusts itself; a request over a limit is refused with the limit in the message.
    """

    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 64 << 10
    max_headers: int = 100
    max_json_depth: int = 64
    max_connections: int = 8192
    max_sequences_per_request: int = 512  # prompts times best_of
    max_queued_sequences: int = 1024  # beyond those the engine can run at once
    max_queued_cache_fills: float = 4.0  # prompt tokens held, in sizes of the KV cache
    max_held_body_bytes: int = 256 << 20
    max_sequences_per_key: int = 0  # at once; 0: all that the server holds, or a fair part
    max_stream_bytes: int = 256 << 10  # made for one stream and not yet read by its client
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_connection_timeout_s: int = 30
    queue_timeout_s: float = 60.0
    run_timeout_s: float = 600.0
    write_timeout_s: float = 30.0
    keepalive_s: float = 15.0
    drain_s: float = 30.0
    step_overdue_multiple: float = 20.0  # a step that takes so many times its price: not ready
    step_overdue_s: float = 10.0  # but never before this
    step_deadline_s: float = 30.0  # pending work and no step for so long: not ready
    # And for so long, and longer than step_overdue_multiple times its price: the engine is killed
    # and started again. The other limit is for the first step of each kind, which may compile
    # kernels or read weights from a disk, and for engines whose steps have no price.
    step_kill_s: float = 30.0
    first_step_kill_s: float = 300.0
    max_engine_restarts: int = 3  # in a row, without a healthy minute between them
    tokenizer_processes: int = 3  # all but one of them at once for one tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where to listen, for whom, and what to serve.

    `port` 0 lets the system choose. With an `admin_port`, /metrics and explanations of everybody's
    requests are there alone. `served_model_name` is what clients put into `model` (the
    model's own name when None). Keys come one a line from `api_key_file`, or from the environment
    variable RIDGELINE_API_KEY. `allowed_hosts` are further names a browser may know this server
    by. `price_per_hour` of all the engine's devices, in any currency, puts money on request costs.
    `access_log`: a line for each request; `log_format`: one of ridgeline.log.FORMATS. Traces go to
    the OpenTelemetry collector at `otlp_endpoint`. With `tripwire` a process that serves ends when
    it does what it never should (ridgeline.server.tripwire).
    `builder` names the function that makes the engine ("module:function"): an extension seam.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int | None = None
    admin_host: str = "127.0.0.1"
    served_model_name: str | None = None
    api_key_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allow_anyone_on_the_network_without_a_key: bool = False
    price_per_hour: float | None = None
    log_level: str = "INFO"
    log_format: str = "text"
    access_log: bool = False
    otlp_endpoint: str | None = None
    tripwire: bool = True
    limits: Limits = field(default_factory=Limits)
    builder: str = DEFAULT_BUILDER


def check_serve_numbers(config: ServeConfig) -> None:
    """What can be said of the numbers before anything is started, the engine's among them;
    ConfigError names the first that is wrong."""
    check_numbers(config.engine)
    check_ranges(config, [("port", 0, 65535)])
    if config.admin_port is not None:
        check_ranges(config, [("admin_port", 0, 65535)])
    if config.price_per_hour is not None:
        check_ranges(config, [("price_per_hour", 0.0, 1e12)])
    check_ranges(config.limits, LIMIT_RANGES)
