"""How much may a chat template and a tokenizer take, and why so much?

Measured on one core of a busy machine: templates of common models take 0.1 to 30 ms; encoding takes
0.3 to 1 us and 140 to 240 bytes of memory for a byte of text, most for text that is no words.
Loading took at most 0.4 s; memory while loading was at most 40 times the files.
"""

from __future__ import annotations

TEMPLATE_S = 0.25  # of processor time, as all seconds here but WALL_S
ENCODE_S = 0.5
ENCODE_S_PER_BYTE = 5e-6  # of text, as UTF-8
WORK_BYTES = 256 << 20
ENCODE_BYTES_PER_BYTE = 500
MAX_IDS = 1 << 22  # of all texts of a request: no fewer than the bytes of the largest ordinary body
RETAINED_BYTES = 128 << 20  # that a worker may keep from one request to the next
LOAD_S = 30.0
LOAD_BYTES = 1 << 30
LOAD_BYTES_PER_BYTE = 40
WALL_S = 20.0  # a worker that gets no processor for so long is killed
WALL_S_PER_BYTE = 20e-6
LOAD_WALL_S = 120.0
