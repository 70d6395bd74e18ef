"""What an attack counts, and the table of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

#: What must be 0, as a column of the table.
FAULTS = ("lost", "twice", "tracebacks", "hangs", "other")
_COLUMNS = ("inputs", "calls", "kills", *FAULTS)
_MOST_EXAMPLES = 40
_NAME = re.compile(r"'[^']*'|\S*\d\S*|\S+\.jsonl\S*")


@dataclass
class Counts:
    """Of one attack. ``other``: faults that are no row lost or repeated, no traceback and no hang."""

    name: str
    of: Counter[str] = field(default_factory=Counter)
    codes: Counter[int | None] = field(default_factory=Counter)
    #: By what is wrong, names and numbers left out: one of each says more than many of the first.
    examples: dict[str, str] = field(default_factory=dict)

    def fault(self, kind: str, where: str, what: str, number: int = 1) -> None:
        self.of[kind] += number
        if len(self.examples) < _MOST_EXAMPLES:
            self.examples.setdefault(_NAME.sub("", what), f"{where}: {what}")

    @property
    def is_clean(self) -> bool:
        return not any(self.of[kind] for kind in FAULTS)


def table(attacks: Iterable[Counts]) -> str:
    """A row an attack, as markdown."""
    rows = [("attack", *_COLUMNS), ("-", *["-:"] * len(_COLUMNS))]
    rows += [(counts.name, *(f"{counts.of[column]:,}" for column in _COLUMNS)) for counts in attacks]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
