"""Which metrics does the server have, what does each mean, and where does its value come from?

The names are an interface: dashboards and alerts hang on them (deploy/). docs/metrics.md is made
from these declarations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import ridgeline
from ridgeline.request import FinishReason
from ridgeline.server.errors import CODES
from ridgeline.server.metrics_page import Declared, Rows, Seen, Value


def _known(counts: Mapping[str, int], names: Sequence[str]) -> Rows:
    """Those of `names` from the start, at 0: a counter that appears at 1 has no rise to be seen."""
    return {(name,): float(counts.get(name, 0)) for name in sorted({*names, *counts})}


def _counter(
    name: str, text: str, read: Callable[[Seen], Value], *labels: str, of_model: bool = True
) -> Declared:
    return Declared("counter", name, text, read, labels, of_model)


def _gauge(
    name: str, text: str, read: Callable[[Seen], Value], *labels: str, of_model: bool = True
) -> Declared:
    return Declared("gauge", name, text, read, labels, of_model)


def _histogram(name: str, text: str, read: Callable[[Seen], Value]) -> Declared:
    return Declared("histogram", name, text, read)


STATE = (
    _gauge(
        "info",
        "Always 1; the labels say which version of Ridgeline serves which model.",
        lambda seen: {(ridgeline.__version__,): 1.0},
        "version",
    ),
    _gauge(
        "ready",
        "1 while a request sent now would be served, as on GET /health/ready; 0 while the model is "
        "loaded, the server drains, the engine is restarted or a step makes no progress.",
        lambda seen: seen.would_serve,
    ),
    _gauge(
        "engine_up",
        "1 while there is an engine process with its model loaded, else 0.",
        lambda seen: seen.engine.is_up,
    ),
    _counter(
        "engine_restarts_total",
        "Engine processes that died or were killed and were replaced by a new one.",
        lambda seen: seen.engine.num_restarts,
    ),
)

TRAFFIC = (
    _counter(
        "requests_total",
        "HTTP requests for completions or chats that the engine took in; one with several prompts "
        "or samples counts once.",
        lambda seen: seen.engine.traffic.num_requests,
    ),
    _counter(
        "request_errors_total",
        "HTTP requests that ended in an error, by the error's code, on any path but the probes: "
        "refused, failed on the way, or given up by the client (client_gone).",
        lambda seen: _known(seen.engine.traffic.refused, [*CODES, "client_gone"]),
        "code",
    ),
    _counter(
        "sequences_total",
        "Sequences (one for each sample of each prompt) that the engine took in.",
        lambda seen: seen.engine.traffic.num_sequences,
    ),
    _counter(
        "sequences_finished_total",
        "Sequences that ended, by why: stop (end token or stop string), length (token limit), "
        "abort (the client left), error (the engine failed).",
        lambda seen: _known(seen.engine.traffic.finished, [row.value for row in FinishReason]),
        "finish_reason",
    ),
    _gauge(
        "sequences_running",
        "Sequences in the engine's batch after its last step.",
        lambda seen: seen.gauges.num_running,
    ),
    _gauge(
        "sequences_waiting",
        "Sequences in the engine's queue after its last step: they wait for a place in the batch "
        "or for KV cache blocks.",
        lambda seen: seen.gauges.num_waiting,
    ),
    _counter(
        "prompt_tokens_total",
        "Prompt tokens that the engine took in, found in the prefix cache or not; a prompt with "
        "several samples counts once.",
        lambda seen: seen.engine.traffic.num_prompt_tokens,
    ),
    _counter(
        "generation_tokens_total",
        "Tokens that the engine generated for requests, end tokens included.",
        lambda seen: seen.engine.traffic.num_output_tokens,
    ),
    _counter(
        "late_outputs_total",
        "Outputs of the engine that were thrown away, since their request had ended before.",
        lambda seen: seen.engine.traffic.num_late_outputs,
    ),
)

LATENCY = (
    _histogram(
        "request_queue_seconds",
        "Seconds from the moment a tokenized prompt was handed to the engine until the first step "
        "with it was planned; counted when that step ends, once for each prompt.",
        lambda seen: seen.engine.latency.queue,
    ),
    _histogram(
        "time_to_first_token_seconds",
        "Seconds from a request's arrival (its body was read) until its first token came from the "
        "engine, counted once for each sequence.",
        lambda seen: seen.engine.latency.first_token,
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Seconds from one token of a sequence to the next, as they came from the engine; tokens "
        "that came together share their time evenly.",
        lambda seen: seen.engine.latency.between_tokens,
    ),
    _histogram(
        "request_e2e_seconds",
        "Seconds from a request's arrival (its body was read) until its end, whatever its finish "
        "reason, counted once for each sequence.",
        lambda seen: seen.engine.latency.whole_request,
    ),
)

KV_CACHE = (
    _gauge(
        "kv_cache_blocks", "Blocks that the engine's KV cache has.", lambda seen: seen.num_blocks
    ),
    _gauge(
        "kv_cache_used_blocks",
        "KV cache blocks that sequences held after the last step; a block that only the prefix "
        "cache keeps counts as free.",
        lambda seen: seen.gauges.num_used_blocks,
    ),
    _gauge(
        "kv_cache_usage_ratio",
        "Share of the KV cache blocks, 0 to 1, that sequences held after the last step; a block "
        "that only the prefix cache keeps counts as free.",
        lambda seen: seen.gauges.num_used_blocks / seen.num_blocks if seen.num_blocks else 0.0,
    ),
    _counter(
        "preemptions_total",
        "Running sequences that lost their KV cache blocks to others and went back into the "
        "queue; what they lose is computed again.",
        lambda seen: seen.gauges.num_preemptions,
    ),
    _counter(
        "prefix_cache_queried_tokens_total",
        "Prompt tokens looked up in the prefix cache, when their sequence was first scheduled.",
        lambda seen: seen.gauges.num_prefix_queried_tokens,
    ),
    _counter(
        "prefix_cache_hit_tokens_total",
        "Prompt tokens found in the prefix cache, which were not computed again; counted when "
        "their sequence was first scheduled.",
        lambda seen: seen.gauges.num_prefix_hit_tokens,
    ),
)

STEPS = (
    _counter(
        "engine_steps_total",
        "Engine steps that are over, failed ones too; a step is one pass of a batch through the "
        "model.",
        lambda seen: seen.gauges.num_steps,
    ),
    _counter(
        "engine_failed_steps_total",
        "Engine steps that failed; sequences in them ended with an error.",
        lambda seen: seen.gauges.num_failed_steps,
    ),
    _counter(
        "engine_overdue_steps_total",
        "Engine steps seen to run much longer than the cost model expects (by the limits "
        "--step-overdue-multiple and --step-overdue-s); the server is not ready meanwhile.",
        lambda seen: seen.engine.watchdog.num_overdue,
    ),
    _counter(
        "engine_busy_seconds_total",
        "Seconds in which at least one engine step was in flight.",
        lambda seen: seen.gauges.busy_s,
    ),
    _counter(
        "engine_scheduled_tokens_total",
        "Tokens that engine steps computed: of prompts, of answers, and draft tokens.",
        lambda seen: seen.gauges.num_scheduled_tokens,
    ),
    _counter(
        "batch_rows_total",
        "Sequences in the batch of an engine step, summed over all steps.",
        lambda seen: seen.costs.num_rows,
    ),
)

KINDS = "by kind: decode (one token each), verify (draft tokens), prefill (prompts), mixed"
COSTS = (
    _gauge(
        "cost_model_info",
        "Always 1; the labels say for which device the cost model expects times of steps, and "
        "whether its constants are assumed or calibrated.",
        lambda seen: {(seen.prices.device, seen.prices.origin): 1.0},
        "device",
        "origin",
    ),
    _counter(
        "measured_steps_total",
        f"Engine steps that succeeded and whose time was measured, {KINDS}.",
        lambda seen: seen.by_kind("num_steps"),
        "kind",
    ),
    _counter(
        "step_measured_seconds_total",
        f"Seconds that engine steps took, {KINDS}.",
        lambda seen: seen.by_kind("measured_s"),
        "kind",
    ),
    _counter(
        "step_expected_seconds_total",
        f"Seconds that engine steps should have taken by the cost model, {KINDS}.",
        lambda seen: seen.by_kind("expected_s"),
        "kind",
    ),
    _counter(
        "step_ideal_seconds_total",
        "Seconds that engine steps would have taken on a device that reaches its data sheet: the "
        "roofline.",
        lambda seen: seen.costs.ideal_s,
    ),
    _counter(
        "host_gap_seconds_total",
        "Seconds in which the device waited for the host between two engine steps, with work "
        "pending.",
        lambda seen: seen.costs.host_s,
    ),
    _counter(
        "step_flops_total",
        "Floating-point operations of all engine steps on all devices, by the model's shapes.",
        lambda seen: seen.costs.flops,
    ),
    _counter(
        "step_bytes_total",
        "Bytes that all engine steps moved to and from device memory, by the model's shapes.",
        lambda seen: seen.costs.bytes,
    ),
    _gauge(
        "device_peak_flops_per_second",
        "Floating-point operations a second that the engine's devices could do at best, together.",
        lambda seen: seen.prices.flops_per_s,
    ),
    _gauge(
        "device_peak_bytes_per_second",
        "Bytes a second that the engine's devices could move at best, together.",
        lambda seen: seen.prices.bytes_per_s,
    ),
    _gauge(
        "achieved_flops_ratio",
        "Share of the devices' peak floating-point rate, 0 to 1, that engine steps reached while "
        "they ran: the mean since the engine's start.",
        lambda seen: seen.share(seen.costs.flops, seen.prices.flops_per_s),
    ),
    _gauge(
        "achieved_bandwidth_ratio",
        "Share of the devices' peak memory bandwidth, 0 to 1, that engine steps reached while they "
        "ran: the mean since the engine's start.",
        lambda seen: seen.share(seen.costs.bytes, seen.prices.bytes_per_s),
    ),
)

SPECULATION = (
    _counter(
        "speculative_steps_total",
        "Engine steps that verified draft tokens and read no prompts.",
        lambda seen: seen.drafts.num_steps,
    ),
    _counter(
        "speculative_rows_total",
        "Sequences in steps that verified draft tokens, summed over these steps.",
        lambda seen: seen.drafts.num_rows,
    ),
    _counter(
        "speculative_tokens_total",
        "Tokens that sequences got from steps that verified draft tokens: accepted ones, and one "
        "of the model's own for each sequence.",
        lambda seen: seen.drafts.num_tokens,
    ),
    _counter(
        "draft_tokens_total",
        "Draft tokens that the model verified, accepted ones and rejected ones.",
        lambda seen: seen.drafts.num_draft_tokens,
    ),
    _counter(
        "draft_accepted_tokens_total",
        "Draft tokens that the model verified and accepted: they became part of an answer.",
        lambda seen: seen.drafts.num_accepted,
    ),
    _counter(
        "draft_position_reached_total",
        "Draft tokens by position (0 is the first of a draft) whose forerunners were all accepted.",
        lambda seen: seen.by_position(seen.drafts.num_looked),
        "position",
    ),
    _counter(
        "draft_position_accepted_total",
        "Draft tokens by position (0 is the first of a draft) that were accepted.",
        lambda seen: seen.by_position(seen.drafts.num_right),
        "position",
    ),
    _counter(
        "draft_seconds_total",
        "Seconds spent on making draft tokens: the part of steps that verify them which the cost "
        "model puts to drafting.",
        lambda seen: seen.drafts.drafting_s,
    ),
    _counter(
        "verify_seconds_total",
        "Seconds spent on verifying draft tokens: the part of steps that verify them which the "
        "cost model does not put to drafting.",
        lambda seen: seen.drafts.verifying_s,
    ),
    _counter(
        "speculative_baseline_seconds_total",
        "Seconds that the tokens of steps with draft tokens would have taken without drafts, by "
        "the cost model.",
        lambda seen: seen.drafts.plain_s,
    ),
)

MEMORY = (
    _gauge(
        "memory_planned_bytes",
        "Bytes of device memory that the engine planned to take at its start, by purpose.",
        lambda seen: (
            {} if seen.ready is None else {(what,): float(size) for what, size in seen.ready.memory}
        ),
        "purpose",
    ),
    _gauge(
        "busiest_expert_load",
        "Tokens of the busiest expert for each token of the mean one since the start, of each "
        "layer with experts, in their order; read at most once a second while steps run. Padding "
        "of captured steps is counted too.",
        lambda seen: {(str(at),): load for at, load in enumerate(seen.gauges.expert_load)},
        "layer",
    ),
    _gauge(
        "fullest_rank_load",
        "Tokens, since the start, of the experts that are now on the fullest rank for each token "
        "of those on the mean one, of each layer with experts; with --expert-placement load alone.",
        lambda seen: {(str(at),): load for at, load in enumerate(seen.gauges.rank_load)},
        "layer",
    ),
    _counter(
        "expert_exchanges_total",
        "Pairs of experts that have changed ranks.",
        lambda seen: seen.gauges.num_expert_exchanges,
    ),
    _gauge(
        "device_memory_bytes",
        "Bytes of memory that the engine's device has.",
        lambda seen: 0 if seen.ready is None else seen.ready.device_memory_total,
    ),
    _gauge(
        "device_memory_used_bytes",
        "Bytes of the device's memory in use by any program, read at most once a second while "
        "steps run.",
        lambda seen: seen.gauges.device_memory_used,
    ),
    _gauge(
        "startup_seconds",
        "Seconds that the engine's latest start took, by phase.",
        lambda seen: (
            {} if seen.ready is None else {(name,): value for name, value in seen.ready.startup}
        ),
        "phase",
    ),
)

RANK = "of each rank of a group (--tp, --pp, --dp), asked twice a second"
RANKS = (
    _counter(
        "rank_steps_total",
        f"Steps begun, {RANK}.",
        lambda seen: seen.by_rank("num_steps"),
        "rank",
        "host",
    ),
    _counter(
        "rank_collectives_total",
        f"Collectives entered, those of captured steps not counted, {RANK}.",
        lambda seen: seen.by_rank("num_collectives"),
        "rank",
        "host",
    ),
    _counter(
        "rank_waiting_seconds_total",
        f"Seconds spent waiting for others in collectives, {RANK}; over gloo seconds in the calls, "
        "over NCCL those of the host in them. A rank that waits much less than the others is the "
        "one they wait for.",
        lambda seen: seen.by_rank("waited_s"),
        "rank",
        "host",
    ),
    _gauge(
        "rank_memory_bytes",
        f"Bytes of memory held, {RANK}: of a GPU what the process has reserved, on a CPU resident "
        "memory, mapped files included.",
        lambda seen: seen.by_rank("memory_bytes"),
        "rank",
        "host",
    ),
    _gauge(
        "rank_last_collective",
        f"Always 1; the label says which collective was entered last, {RANK}.",
        lambda seen: {
            (str(one.rank), one.host, one.last_collective): 1.0 for one in seen.gauges.ranks
        },
        "rank",
        "host",
        "collective",
    ),
)

PROCESSES = (
    _gauge(
        "process_resident_memory_bytes",
        "Bytes of main memory that a process holds, files it has mapped included: server is the "
        "HTTP side, engine runs the model, text holds its tokenizer, which its workers share.",
        lambda seen: seen.by_process("process_resident_memory_bytes"),
        "process",
    ),
    _counter(
        "process_cpu_seconds_total",
        "CPU seconds, user and system, of a process: server is the HTTP side, engine runs the "
        "model, text holds its tokenizer (without its workers).",
        lambda seen: seen.by_process("process_cpu_seconds"),
        "process",
    ),
    _gauge(
        "process_open_fds",
        "File descriptors that a process has open: server is the HTTP side, engine runs the model, "
        "text holds its tokenizer.",
        lambda seen: seen.by_process("process_open_fds"),
        "process",
    ),
    _gauge(
        "http_connections",
        "Connections of clients that are open, idle ones included.",
        lambda seen: len(seen.service.connections),
        of_model=False,
    ),
    _gauge(
        "http_open_requests",
        "HTTP requests with a body, or for an explanation, being read, answered or waiting.",
        lambda seen: seen.service.num_open,
        of_model=False,
    ),
    _gauge(
        "http_held_body_bytes",
        "Memory for request bodies, and for what is read from them, in bytes.",
        lambda seen: seen.service.admission.num_bytes + seen.service.aside.num_bytes,
        of_model=False,
    ),
    _gauge(
        "http_tasks",
        "Tasks of the server's event loop: some for each open connection and request.",
        lambda seen: len(asyncio.all_tasks()),
        of_model=False,
    ),
)

GROUPS: Mapping[str, tuple[Declared, ...]] = {
    "State": STATE,
    "Traffic": TRAFFIC,
    "Latency": LATENCY,
    "KV cache and prefix cache": KV_CACHE,
    "Engine steps": STEPS,
    "Expected against measured time, and the roofline": COSTS,
    "Speculative decoding": SPECULATION,
    "Memory and start": MEMORY,
    "Ranks": RANKS,
    "Processes and connections": PROCESSES,
}
METRICS = tuple(metric for group in GROUPS.values() for metric in group)
