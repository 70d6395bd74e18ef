"""The grammars of mamf-finder by their traits, and the forms of row that its versions print; a log is of every version
that none of its lines rules out.

A new version is one entry here, plus a form where its rows look new.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True)
class Grammar:
    """``reduction``: which of the three printed numbers it is, from 1. ``is_staged``: scouts first, then confirms.

    ``traits``: the values that lines of this version can show; a trait that is not named rules nothing out.
    """

    version: str
    reduction: int
    traits: Mapping[str, frozenset[str]]
    is_staged: bool = False


def _grammar(version: str, reduction: int, traits: Mapping[str, str], is_staged: bool = False) -> Grammar:
    return Grammar(version, reduction, {name: frozenset(values.split()) for name, values in traits.items()}, is_staged)


# The traits:
#   row       form of the rows                       label    of the shapes in the summary
#   pad       whether shapes fill a column           summary  its form
#   shapes    the row's own, or that of the best     means    one geometric mean, or both
#   order     the figure that comes first            legend   what TFLOPS are
#   end       a blank before TFLOPS or none          header   values with bullets or plain
#   msmf      form of the confirms                   search   whether there are modes and stages
#   headline  digits of it                           dtype    whether the command line can choose
#   printed   the version number                 tag      of the phase that tries a row
_V1 = {"header": "plain", "search": "none"}
_V1_ONE = _V1 | {"row": "stated", "summary": "one", "shapes": "own", "dtype": "implied"}
_THREE = {"row": "three", "order": "mean", "end": "spaced", "label": "MxNxK", "summary": "many"}
_V2 = _THREE | {"means": "none", "legend": "none", "header": "plain", "search": "none", "printed": "2"}
_V2_NEW = _V2 | {"means": "geomean", "legend": "printed"}
_STAGED = {"label": "MxNxK", "summary": "many headlines", "means": "both", "legend": "printed", "header": "bullets"}
_V3 = _STAGED | {"row": "columns", "search": "mode titled", "headline": "integer"}
_V3_DEV = _THREE | _STAGED | {"row": "three tagged", "headline": "decimal", "printed": "3 4 5 6 7 8"}
# Its grids were first as those of version 2, with nothing to confirm, and beside a search in stages.
_V3_GRID = _V3_DEV | {"summary": "many", "search": "mode", "mode": "grid", "tag": "none", "headline": "none"}

GRAMMARS = (
    _grammar("v1a", 2, _V1 | {"row": "bare", "summary": "label_first"}),
    _grammar("v1b", 2, _V1_ONE | {"pad": "no"}),
    _grammar("v1c", 2, _V1_ONE | {"pad": "yes", "shapes": "own best"}),
    _grammar("v1c+", 2, _V1_ONE | {"pad": "yes", "dtype": "implied chosen"}),
    _grammar("v1d", 2, _V1 | {"row": "pair", "summary": "pair"}),
    _grammar("v2a", 2, _V2 | {"order": "max"}),
    _grammar("v2b", 2, _V2 | {"order": "max", "label": "MxKxN"}),
    _grammar("v2b", 2, _V2 | {"end": "tight", "label": "MxKxN"}),
    _grammar("v2c", 3, _V2 | {"end": "tight spaced"}),
    _grammar("v2d", 3, _V2 | {"means": "geomean"}),
    _grammar("v2e", 3, _V2_NEW),
    _grammar("v2f", 3, _V2_NEW | {"header": "bullets"}),
    _grammar("v2g", 3, _V2_NEW | {"header": "bullets", "means": "both"}),
    _grammar("v3-dev", 3, _V3_DEV | {"search": "mode prefixed", "tag": "printed"}, is_staged=True),
    _grammar("v3-dev", 3, _V3_GRID),
    _grammar("v3", 3, _V3 | {"msmf": "runs", "printed": "3"}, is_staged=True),
    _grammar("v4", 3, _V3 | {"msmf": "drop", "printed": "4"}, is_staged=True),
    _grammar("F1", 2, _V1 | {"row": "trial", "summary": "one upload"}),
)


Evidence = tuple[str, str]


def consistent(evidence: Iterable[Evidence]) -> tuple[Grammar, ...]:
    """The versions that could have printed all of it.

    The printed version number decides only between versions that the grammar leaves open: it is not to be trusted.
    """
    seen = list(evidence)
    by_looks = [one for one in GRAMMARS if all(_allows(one, trait) for trait in seen if trait[0] != "printed")]
    by_number = [one for one in by_looks if all(_allows(one, trait) for trait in seen if trait[0] == "printed")]
    return tuple(by_number or by_looks)


def _allows(grammar: Grammar, trait: Evidence) -> bool:
    name, value = trait
    return name not in grammar.traits or value in grammar.traits[name]


def version_of(grammars: Iterable[Grammar]) -> str | None:
    """One version, or all that remain as in ``v2a/v2b``."""
    return "/".join(dict.fromkeys(one.version for one in grammars)) or None


def reduction_of(grammars: Iterable[Grammar]) -> int | None:
    """Which printed number is the reduction, where every version left agrees."""
    places = {one.reduction for one in grammars}
    return places.pop() if len(places) == 1 else None
