"""The ceilings for training steps of models: from logs, from the resumed log, or known for this device."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator

from mamf.backend import Backend
from mamf.ceilings.share import KnownCeiling, KnownCeilings, given_ceiling
from mamf.cli.attention_ceilings import given_ceilings
from mamf.cli.resuming import contradiction
from mamf.cli.terminal import warn
from mamf.contribution.known_ceilings import measured_peak
from mamf.errors import MamfError


def given(
    options: argparse.Namespace, needed: Collection[tuple[str, str]], backend: Backend
) -> dict[tuple[str, str], KnownCeiling]:
    """The needed ceilings in the logs of ``--ceiling``. Raises the errors of ``given_ceilings``."""
    found = given_ceilings(options, needed, backend)
    return {key: given_ceiling(each) for key, each in found.items() if key in needed}


def require_repeated(options: argparse.Namespace, held: KnownCeilings, asked: KnownCeilings) -> None:
    """Raises LogMismatchError for a ceiling that differs from the log's."""
    for key in held.keys() & asked.keys():
        if held[key] != asked[key]:
            then = f"a {' '.join(key)} ceiling of {held[key].tflops:.6g} TFLOPS"
            raise contradiction(options, "ceiling", then, options.ceiling)


def known_here(backend: Backend, needed: Collection[tuple[str, str]]) -> Iterator[KnownCeiling]:
    """Ceilings that were measured on this device or contributed for its model; warns of missing ones."""
    for dtype, regime in needed:
        try:
            known = measured_peak(backend, dtype, regime)
        except MamfError as error:
            warn(f"no MAMFU in {regime}: {error}")
            continue
        yield KnownCeiling(dtype, regime, known.tflops, known.source, known.description)
