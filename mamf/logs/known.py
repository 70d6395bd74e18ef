"""Looks up the operation of a record: an installed one, else a placeholder made from the record."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mamf.errors import UnknownNameError
from mamf.operation import Operation
from mamf.operations.unknown import Unknown
from mamf.plugins.discovery import operation

AnyOperation = Operation[Any, Any]


@functools.cache
def _installed(name: str) -> AnyOperation:
    return operation(name)


def operation_called(name: str, record: Mapping[str, Any] | None = None) -> AnyOperation:
    """The operation with this name; a placeholder if it is not installed, so that its rows can still be shown."""
    try:
        return _installed(name)
    except UnknownNameError:
        return Unknown(name, record or {})
