"""How long does a message between devices take?

Each formula has a part per message (alpha, the link's latency) and a part per byte:

  all-reduce ring      2 (n-1) a + 2 (n-1)/n X/bw         X bytes on every rank
             one-shot  a + (n-1) X/bw                     every rank reads all others' X
             two-shot  2 a + 2 (n-1)/n X/bw               every rank sums one part, then all gather
  all-gather           a + (n-1)/n X/bw                   X bytes after it
  all-to-all           a + (n-1)/n X/bw                   X bytes on every rank
  point to point       a + X/bw                        gloo: 3 a + X/bw

gloo sends when the receiver, which it asks first, has answered; who waits already has answered.
One- and two-shot need every pair to see each other's memory, that is, a link inside one node.
Decode steps send little and pay for the latency; prefill steps pay for the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.hardware import Device
from ridgeline.errors import ConfigError

ASKED_FIRST = 3  # latencies of a message between stages by gloo, which serves those of CPUs
HOST_LATENCY_S = 40e-6  # through host memory, without a link between devices
HOST_SHARE = 0.5  # of the host link's rate: every byte goes up and comes down
HOST_DEVICES = 8  # devices on one host


@dataclass(frozen=True, slots=True)
class Wire:
    """What messages among some devices go over; rates are per direction and device."""

    kind: str
    bytes_per_s: float
    latency_s: float
    is_direct: bool  # ranks read each other's memory


def wire(device: Device, ranks: int) -> Wire:
    """What `ranks` devices of this kind talk over: their link, the host's memory, or the network.

    ConfigError when there is nothing.
    """
    link = device.link
    if link is not None and ranks <= link.max_devices:
        speed = link.pair_bytes_per_s if ranks == 2 else link.bytes_per_s
        return Wire(link.kind, speed, link.latency_s, is_direct=True)
    if link is None and ranks <= HOST_DEVICES and device.host_link_bytes_per_s:
        speed = device.host_link_bytes_per_s * HOST_SHARE
        return Wire("host memory", speed, HOST_LATENCY_S, is_direct=False)
    if device.network_bytes_per_s:
        speed = device.network_bytes_per_s
        return Wire("network", speed, device.network_latency_s, is_direct=False)
    raise ConfigError(f"{ranks} devices {device.name} have no way to talk to each other")


def all_reduce_s(num_bytes: float, ranks: int, bytes_per_s: float, alpha_s: float) -> float:
    """The best algorithm on a direct link."""
    return min(
        ring_s(num_bytes, ranks, bytes_per_s, alpha_s),
        one_shot_s(num_bytes, ranks, bytes_per_s, alpha_s),
        two_shot_s(num_bytes, ranks, bytes_per_s, alpha_s),
    )


def ring_s(num_bytes: float, ranks: int, bytes_per_s: float, alpha_s: float) -> float:
    return 2 * (ranks - 1) * (alpha_s + num_bytes / ranks / bytes_per_s)


def one_shot_s(num_bytes: float, ranks: int, bytes_per_s: float, alpha_s: float) -> float:
    return 0.0 if ranks == 1 else alpha_s + (ranks - 1) * num_bytes / bytes_per_s


def two_shot_s(num_bytes: float, ranks: int, bytes_per_s: float, alpha_s: float) -> float:
    if ranks == 1:
        return 0.0
    return 2 * alpha_s + 2 * (ranks - 1) / ranks * num_bytes / bytes_per_s


def message_s(
    kind: str,
    sent_bytes: float,
    ranks: int,
    bytes_per_s: float,
    alpha_s: float,
    *,
    is_direct: bool = True,
) -> float:
    """Seconds of an operator that sends `sent_bytes` from each rank, as `ops` counts them."""
    if ranks == 1:
        return 0.0
    if kind == "all_reduce":
        size = sent_bytes * ranks / (2 * (ranks - 1))
        reduce = all_reduce_s if is_direct else ring_s
        return reduce(size, ranks, bytes_per_s, alpha_s)
    return alpha_s + sent_bytes / bytes_per_s  # what stays on its rank is not in sent_bytes
