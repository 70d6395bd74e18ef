"""Make ceilings for tests: as a search confirms them, and as contributed.csv lists them."""

from mamf.ceilings.ceiling import Ceiling
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.peaks import ContributedRate
from mamf.statistics import Interval

DEFAULT_FIELDS = {"device": "card", "problem": MatmulProblem(), "regime": "burst", "kernel": "torch.mm"}
DEFAULT_FIELDS |= {"shape": MatmulShape(8192, 8192, 8192), "round_count": 9}


def ceiling(rate, **changes):
    """Return a ceiling with an interval of +-1 %. ``changes``: other fields to set."""
    return Ceiling(**DEFAULT_FIELDS | {"rate": rate, "interval": Interval(0.99 * rate, 1.01 * rate, 0.95)} | changes)


def contributed(device, compute_units, power_limit_watts, rate, dtype="bfloat16", regime="sustained", **changes):
    """Return a ceiling as contributed.csv lists it, with an interval of +-1 %."""
    fields = {
        "device": device,
        "compute_units": compute_units,
        "power_limit_watts": power_limit_watts,
        "dtype": dtype,
    }
    interval = Interval(0.99 * rate, 1.01 * rate, 0.95)
    return ContributedRate(rate=rate, interval=interval, regime=regime, source="contributed", **fields, **changes)
