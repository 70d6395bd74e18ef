"""The ceilings that shares of attention are of: given, or of the log that is resumed."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from mamf.attention_sweep import Ceilings, require_same_card
from mamf.backend import Backend
from mamf.ceiling import Ceiling
from mamf.cli.resuming import contradiction, require_repeated
from mamf.errors import UsageError
from mamf.records import ceiling_record
from mamf.run_log import RunLog, read_run_log

_NONE = "no ceiling"


def given_ceilings(
    options: argparse.Namespace, needed: Collection[tuple[str, str]], backend: Backend
) -> dict[tuple[str, str], Ceiling]:
    """What the logs of ``--ceiling`` hold. Raises UsageError when one holds none, or they lack one that is needed, and
    IncomparableError for another card's.
    """
    found: dict[tuple[str, str], Ceiling] = {}
    for path in options.ceiling or ():
        log = read_run_log(path)
        if not log.all_ceilings:
            raise UsageError(f"{path} holds no ceiling: give a log of 'mamf find'")
        for ceiling in log.all_ceilings.values():
            require_same_card(ceiling, backend)
        found |= log.all_ceilings
    for dtype, regime in needed if options.ceiling else ():
        if (dtype, regime) not in found:
            raise UsageError(f"no {dtype} {regime} ceiling in {', '.join(map(str, options.ceiling))}")
    return found


def is_without_ceiling(log: RunLog) -> bool:
    return bool(log.measurements) and not log.all_ceilings


def require_repeated_ceilings(options: argparse.Namespace, log: RunLog, given: Ceilings) -> None:
    """Raises LogMismatchError for ceilings that are not those of the log."""
    held = log.all_ceilings
    require_repeated(
        options, {"no_ceiling": _NONE if is_without_ceiling(log) else "a ceiling"}, {"no_ceiling": lambda given: _NONE}
    )
    if given and is_without_ceiling(log):
        raise contradiction(options, "ceiling", _NONE)
    for key in given.keys() & held.keys():
        if ceiling_record(given[key]) != ceiling_record(held[key]):
            raise contradiction(options, "ceiling", told(held[key]))


def told(ceiling: Ceiling) -> str:
    return f"a {ceiling.problem.dtype} {ceiling.regime} ceiling of {ceiling.tflops:.6g} TFLOPS at {ceiling.shape}"
