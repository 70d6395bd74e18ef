"""The grammars of mamf-finder by their traits; a log is of every version that none of its lines rules out.

A new version is one entry here, plus a row form in forms.py where its rows look new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


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
