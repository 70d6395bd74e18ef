"""Roofs from the ceilings in logs, and whether another log is from the same card."""

from __future__ import annotations

from collections.abc import Iterable

from mamf.ceilings.roof import Roofs, build_roofs, require_same_device
from mamf.errors import UsageError
from mamf.logs.run_log import RunLog


def roofs_of_logs(logs: Iterable[RunLog], anyway: bool = False) -> Roofs:
    """The roofs given by the ceilings in logs of finds and rooflines.

    Raises UsageError for a log that holds none, IncomparableError for those of several cards, unless ``anyway``.
    """
    logs = list(logs)
    for log in logs:
        if not log.all_ceilings and not log.own_ceilings:
            raise UsageError(
                f"{log.path} holds no ceiling: give logs of 'mamf find', of 'mamf find --operation bandwidth' or of "
                "'mamf roofline'; logs whose rows are placed stand before --ceiling"
            )
    ceilings = [each for log in logs for each in (*log.all_ceilings.values(), *log.own_ceilings.values())]
    cache_bytes = next((size for log in logs if (size := log.header["device"]["cache_bytes"])), None)
    return build_roofs(ceilings, cache_bytes, anyway)


def require_same_card(log: RunLog, roofs: Roofs) -> None:
    """Raises IncomparableError for a log of another card than the roofs'."""
    device = log.header["device"]
    require_same_device((roofs.device, roofs.uuid_hash), (device["name"], device["uuid_hash"]))
