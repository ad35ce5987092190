"""A format of tool calls from outside: `call NAME: ARGUMENTS` on a line of its own."""

from __future__ import annotations

from ridgeline.parsers.parser import Broken, Kind, Parser, Reading


class ToyCalls(Parser):
    begins = ("call ",)
    signs = ("call NAME:",)

    def section(self, begin: str) -> Reading[None]:
        name = yield from self.until((":",), most=80)
        if name not in self.tools or (yield from self.peek()) != "{":
            raise Broken
        self.begin_call(name)
        yield from self.value(Kind.ARGUMENTS)
