"""The forms of row that the versions of mamf-finder print. A new one is an entry here."""

from __future__ import annotations

import re
from dataclasses import dataclass

SHAPE = r"\d+x\d+x\d+"
FIGURE = r"(?:\d+(?:\.\d+)?|nan|inf)"
_TENTHS = r"\d+\.\d"
# A row wiped by a shorter one leaves the tail of the longer: TFLOPSPS.
UNIT = r"\s*TFLOPS\w*"
_WINNER = r"(?:\s+<- (?P<winner>.+))?\s*$"
_NAMED = rf"({FIGURE})\((max|median|mean)\)"
_PREFIX = r"\[\w+\] "

#: Names of printed figures, by what they are called here.
STATISTIC = {"mean": "mean", "median": "median", "max": "fastest"}


@dataclass(frozen=True)
class Form:
    """A form of row. Groups of the pattern that are named like a statistic are figures; groups without a name are
    figures with their names behind them.
    """

    row: str
    stage: str
    pattern: re.Pattern[str]


FORMS = tuple(
    Form(row, stage, re.compile(pattern))
    for row, stage, pattern in (
        (
            "trial",
            "",
            rf"Trial\s+(?P<number>\d+) finished with value: (?:\{{'TFLOPS': )?(?P<stated>{FIGURE})\}}? and parameters: "
            r"\{'M': (?P<m>\d+), 'N': (?P<n>\d+), 'K': (?P<k>\d+)\}",
        ),
        (
            "stated",
            "",
            rf"(?P<trial>Trial\s+)?(?<![\w.])(?P<number>\d+) \|\s*(?P<stated>{FIGURE}){UNIT} @ (?P<shape>{SHAPE})"
            rf"(?P<pad>\s*)\| best:\s*(?P<best>{FIGURE}){UNIT} @ (?P<best_shape>{SHAPE})?",
        ),
        (
            "three",
            "",
            r"(?<![\w.])(?P<number>\d+) \|\s*(?P<tag>[a-z][\w-]*\s+)?"
            rf"{_NAMED}[\s/]*(?:{_NAMED}[\s/]*)?(?:{_NAMED}[\s/]*)?(?:TFLOPS\w*\s*)?@ (?P<shape>{SHAPE})\s*"
            r"\| best:\s*(?P<rest>.*)",
        ),
        ("bare", "", rf"^\s*(?P<stated>{FIGURE}) TFLOPS @ (?P<shape>{SHAPE})\s*$"),
        (
            "columns",
            "scout",
            rf"^\s*(?P<number>\d+)\s+(?P<shape>{SHAPE})\s+(?P<mean>{_TENTHS})\s+(?P<median>{_TENTHS})\s+"
            rf"(?P<fastest>{_TENTHS})\s+(?P<best>{_TENTHS})(?:\s+(?P<watts>\d+)(?:\s+(?P<mhz>\d+))?)?{_WINNER}",
        ),
        (
            "columns",
            "screen",
            rf"^\s*(?:\d+|k)\s+(?P<shape>{SHAPE})\s+(?P<fastest>{_TENTHS})\s+(?P<mhz>\d+|-){_WINNER}",
        ),
        (
            "columns",
            "confirm",
            rf"^\s*(?P<shape>{SHAPE})\s+(?P<MSMF>{_TENTHS})\s+(?P<watts>\d+|-)\s+(?P<mhz>\d+|-)"
            rf"(?:\s+(?P<celsius>\d+|-))?\s+drop\s+(?P<drop>-?{_TENTHS}%)\s+spread\s+(?P<spread>{_TENTHS}%)"
            rf"(?:\s+(?P<flag>[a-z].*?))?{_WINNER}",
        ),
        (
            "columns",
            "confirm",
            rf"^\s*(?P<shape>{SHAPE})\s+(?P<MSMF>{_TENTHS})\s+(?P<watts>\d+|-)\s+(?P<mhz>\d+|-)\s+"
            rf"(?P<spread>{_TENTHS}%)\s+(?P<runs>{_TENTHS}(?: {_TENTHS})*)(?:\s+(?P<flag>[a-z(].*?))?{_WINNER}",
        ),
        (
            "columns",
            "confirm",
            rf"^\s*(?P<shape>{SHAPE})\s+(?P<MAMF>{_TENTHS})\s+(?P<watts>\d+|-)\s+(?P<mhz>\d+|-)\s+"
            rf"{_TENTHS}(?: {_TENTHS})*(?:\s+(?P<flag>[a-z].*?))?{_WINNER}",
        ),
        (
            "tagged",
            "confirm",
            rf"{_PREFIX}MSMF (?P<shape>{SHAPE}): \S+ mean=(?P<MSMF>{FIGURE}) TFLOPS(?:\s+(?P<watts>\d+)W)?"
            rf"\s+spread=(?P<spread>{_TENTHS}%)",
        ),
        (
            "tagged",
            "lock-in",
            rf"{_PREFIX}MSMF lock-in: (?P<MSMF>{FIGURE}) TFLOPS\s+spread=(?P<spread>{_TENTHS}%)"
            r"(?:\s+(?P<mhz>\d+)MHz)?(?:\s+\((?P<flag>best available[^)]*)\))?",
        ),
        (
            "tagged",
            "confirm",
            rf"{_PREFIX}MAMF (?P<shape>{SHAPE}): peak=(?P<MAMF>{FIGURE}) TFLOPS(?:\s+(?P<watts>\d+)W)?"
            r"(?:\s+(?P<mhz>\d+)MHz)?(?:\s+\((?P<flag>base-clock[^)]*)\))?",
        ),
    )
)
NAMED = re.compile(_NAMED)
TELEMETRY = re.compile(r"(?P<watts>\d+)W(?:\s+(?P<mhz>\d+)MHz)?")
LOCK_IN = re.compile(rf"{_PREFIX}MSMF lock-in: re-measuring (?P<shape>{SHAPE})")
