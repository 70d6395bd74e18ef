"""Messages between two processes over a pipe: a line of JSON, then bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from mamf.errors import MamfError


class ChannelError(MamfError):
    """The other process has ended, or sent something else than a message."""


@dataclass(frozen=True)
class Channel:
    reading: IO[bytes]
    writing: IO[bytes]

    def send(self, *parts: bytes, **fields: Any) -> None:
        """Send fields that JSON can hold, and bytes. Raises OSError if the other process has ended."""
        self.writing.write(json.dumps({**fields, "sizes": list(map(len, parts))}).encode() + b"\n")
        self.writing.writelines(parts)
        self.writing.flush()

    def receive(self) -> tuple[dict[str, Any], Sequence[bytes]]:
        """The fields and the bytes of the next message. Raises ChannelError."""
        try:
            fields = json.loads(self.reading.readline())
            return fields, [self.reading.read(size) for size in fields.pop("sizes")]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ChannelError("the process that checks has ended") from None
