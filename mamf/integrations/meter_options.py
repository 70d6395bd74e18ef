"""Checks of what a meter is given, before a device is opened: a callback reports a mistake where it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.contribution.known_ceilings import KnownPeak
from mamf.dtypes import canonical_name
from mamf.errors import UsageError
from mamf.limits import require_known, shorten, whole_number
from mamf.measurement import TERA
from mamf.regime_names import CEILINGS

#: Slower than any device by far, and faster: a ceiling in another unit.
_LEAST_CEILING, _MOST_CEILING = 1e9, 1e18
_LEAST = {"sequence_length": 1, "world_size": 1, "model_parallel": 1, "accumulation": 1, "warmup_steps": 0}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError for a value that no meter can have. None stands for an option that is not given."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("tokens_per_step", "samples_per_step"):
        _require_amount(name, given.get(name, 1))
    flops = given.get("flops_per_step", 1)
    if isinstance(flops, Mapping) and "ceiling" in given:
        raise UsageError("ceiling: it is of one dtype; leave it out where flops_per_step is by dtype")
    for each in (flops.values() or [0]) if isinstance(flops, Mapping) else [flops]:
        _require_amount("flops_per_step", each)
    for name in flops if isinstance(flops, Mapping) else ():
        canonical_name(name)
    for name in _LEAST.keys() & given.keys():
        whole_number(name, given[name], _LEAST[name])
    if whole_number("world_size", given.get("world_size", 1)) % given.get("model_parallel", 1):
        raise UsageError(f"model_parallel {given['model_parallel']}: it must divide world_size")
    require_known(("regime", given.get("regime", "sustained"), CEILINGS))
    if "dtype" in given:
        canonical_name(given["dtype"])
    ceiling_flops(given.get("ceiling", TERA))


def ceiling_flops(ceiling: Any) -> float:
    """FLOP/s of a number, KnownPeak or Ceiling. Raises UsageError for anything else, for another unit, and for a
    ceiling whose interval is unknown.
    """
    if isinstance(ceiling, (Ceiling, KnownPeak)):
        if ceiling.interval is not None and not ceiling.interval.is_known:
            raise UsageError("ceiling: it is too noisy to take a share of it; find it again with 'mamf find'")
        return ceiling.flops if isinstance(ceiling, KnownPeak) else ceiling.rate * TERA
    _require_amount("ceiling", ceiling)
    if not _LEAST_CEILING <= ceiling <= _MOST_CEILING:
        raise UsageError(f"ceiling {shorten(ceiling)}: it must be in FLOP/s; 700 TFLOPS are 700e12")
    return float(ceiling)


def _require_amount(name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise UsageError(f"{name} {shorten(value)}: it must be a number above 0")
