"""How do two processes of ours send each other messages over a stream socket?

Each message is four bytes of length (little-endian) and one msgpack value of a fixed schema.
Neither side can be made to run code.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from ridgeline.errors import RidgelineError

MAX_FRAME_BYTES = 256 << 20
HEADER = struct.Struct("<I")

_ENCODER = msgspec.msgpack.Encoder()


class BrokenWire(RidgelineError):
    """The other side sent what is not in the schema, or too much of it."""


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of one message. BrokenWire when it is larger than any reader takes."""
    payload = _ENCODER.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise BrokenWire(f"a message of {len(payload)} bytes is over {MAX_FRAME_BYTES}")
    return HEADER.pack(len(payload)) + payload


def frame_length(header: bytes) -> int:
    """Length of the payload that follows. BrokenWire when it is beyond belief."""
    length: int = HEADER.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise BrokenWire(f"a message of {length} bytes is over {MAX_FRAME_BYTES}")
    return length


def read_frame(sock: socket.socket) -> bytes:
    """The payload of the next frame; waits for it. EOFError when the other side has closed."""
    return read_exactly(sock, frame_length(read_exactly(sock, HEADER.size)))


def read_exactly(sock: socket.socket, length: int) -> bytes:
    """EOFError when the other side closes before that."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        received = sock.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return bytes(data)
