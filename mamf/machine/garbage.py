"""Python's garbage collector, held off where it would be in the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While the device runs, a pause of the host would let it run dry; while hundreds of thousands of rows are read,
    of which none is garbage, looking for some is a sixth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
