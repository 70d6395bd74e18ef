"""Fixtures that several tests share."""

from importlib.metadata import EntryPoint

import pytest
from contribution_logs import SIMULATED, measured, search_little

from mamf import discovery


@pytest.fixture
def registered(monkeypatch):
    """The simulated kernel as an installed distribution declares one: a log names kernels, and resumes by name."""
    point = EntryPoint("simulated.mm", "mamf.testing:SimulatedMatmul", discovery.KERNELS)
    others = discovery.entry_points

    def points(group):
        return [*others(group=group), *([point] if group == discovery.KERNELS else [])]

    monkeypatch.setattr(discovery, "entry_points", points)


@pytest.fixture(scope="session")
def sweep_records(tmp_path_factory):
    shapes = ["4096x8192x16384", "16384x8192x4096", "4096x16384x16384", "16384x16384x16384"]
    regimes = ["--regime", "burst", "sustained"]
    return measured(tmp_path_factory.mktemp("sweep"), "sweep", *SIMULATED, "--shapes", *shapes, *regimes)


@pytest.fixture(scope="session")
def find_records(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        search_little(patch)
        return measured(tmp_path_factory.mktemp("find"), "find", *SIMULATED)
