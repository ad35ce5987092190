"""A pipeline over two hosts that are far from each other, each with ranks that share its layers:
how fast is it, and did the planner know?"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline import demo
from ridgeline.architectures import read_spec
from ridgeline.cost.hardware import Link
from ridgeline.cost.setup import Layout, Precision
from ridgeline.costing import unknown_device
from ridgeline.distributed.links import SECRET_VARIABLE
from ridgeline.loader import read_config
from ridgeline.planner.estimate import Priced
from ridgeline.planner.question import Hardware, Question, offer
from tests.distributed.two_hosts import ADDRESSES, two_hosts, why_not

DELAY_S, NUM_ROWS, NUM_TOKENS, WAIT_S = 0.2, 8, 16, 300
WHERE = f"{ADDRESSES[0]}:7070"
DRIVER = f"""
from time import perf_counter
from ridgeline import LLM, SamplingParams
with LLM("demo:draft", device="cpu", threads=1, tp=2, pp=2, launcher="join",
         join_address="{WHERE}", max_model_len=256, max_num_seqs={NUM_ROWS}) as llm:
    def ask(count):
        few = SamplingParams(max_tokens=count, min_tokens=count)
        llm.generate([f"{{i}} times upon a time" for i in range({NUM_ROWS})], few)
    ask(2)
    began = perf_counter()
    ask({NUM_TOKENS})
    print(perf_counter() - began)
"""


def planned_rate() -> float:
    """Tokens a second of all requests."""
    spec = read_spec(read_config(Path(demo.located("demo:draft"))))
    near = Link("shared memory", 10e9, 10e-6, 2, 10e9)
    figures = unknown_device("", is_cpu=True, threads=1, memory_bytes=1 << 33)
    device = replace(figures, link=near, network_bytes_per_s=1e9, network_latency_s=DELAY_S)
    asked = Question(
        model="m", spec=spec, rate=1.0, num_input=6, num_output=NUM_TOKENS, ttft_s=99.0,
        tpot_s=99.0, offers=(offer(device),),
    )  # fmt: skip
    hardware = Hardware(asked.offers[0], Layout(tp=2, pp=2), Precision("bfloat16"))
    return Priced(asked, hardware).throughput(NUM_ROWS, 2048).tokens_per_s


@pytest.mark.slow
def test_the_planner_knows_the_rate_of_two_far_hosts() -> None:
    if why := why_not():
        pytest.skip(why)
    env = os.environ | {SECRET_VARIABLE: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    with two_hosts(DELAY_S) as (here, there):
        join = (sys.executable, "-m", "ridgeline", "worker", "--join", WHERE, "--rank")
        ranks = [
            subprocess.Popen([*host, *join, str(rank)], env=env)
            for rank, host in ((1, here), (2, there), (3, there))
        ]
        try:
            words = [*here, sys.executable, "-c", DRIVER]
            done = subprocess.run(
                words, env=env, timeout=WAIT_S, check=True, stdout=subprocess.PIPE, text=True
            )
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    rate = NUM_ROWS * NUM_TOKENS / float(done.stdout)
    assert planned_rate() == pytest.approx(rate, rel=0.2)
