"""The format of gpt-oss: messages on channels, each with a head, a body and an end. Source:
https://cookbook.openai.com/articles/openai-harmony"""

from __future__ import annotations

import re
from typing import ClassVar

from ridgeline.parsers.parser import MAX_HEAD, Broken, Kind, Parser, Reading

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Harmony(Parser):
    """Analysis is reasoning, a message to a tool is a call, everything else is content."""

    begins: ClassVar[tuple[str, ...]] = (START, CHANNEL)
    others: ClassVar[tuple[str, ...]] = (MESSAGE, *ENDS, "<|constrain|>")
    signs: ClassVar[tuple[str, ...]] = (CHANNEL,)
    own_reasoning: ClassVar[bool] = True

    def read(self) -> Reading[None]:
        yield from self._try(self._read_recipient())
        while begin := (yield from self.until(self.begins, Kind.CONTENT)):
            yield from self._try(self.section(begin), begin)

    def _read_recipient(self) -> Reading[None]:
        """An answer may begin with whom its first message is for."""
        if (yield from self.peek()) != "t":
            raise Broken
        yield from self.section("")

    def section(self, begin: str) -> Reading[None]:
        """Messages, the first of them behind `begin`. Raises Broken where a head never ends."""
        end = START
        while end == START:
            head = begin + (yield from self.until((MESSAGE,), most=MAX_HEAD))
            channel, recipient = CHANNEL_NAME.search(head), RECIPIENT.search(head)
            if recipient:
                self.begin_call(recipient[1])
            elif begin:
                self._undo = None
            else:
                raise Broken
            is_reasoning = channel is not None and channel[1] == "analysis"
            kind = Kind.REASONING if is_reasoning else Kind.CONTENT
            end = yield from self.until(ENDS, Kind.ARGUMENTS if recipient else kind)
            begin = START
