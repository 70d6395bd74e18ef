"""Fixtures that several tests share."""

import shutil
from importlib.metadata import EntryPoint

import library
import pytest
from contribution_logs import SIMULATED, measured, search_little

from mamf.plugins import discovery


@pytest.fixture(scope="session", autouse=True)
def few_shapes():
    """A find has little to search: how well it searches whole grids is tested in test_search.py."""
    with pytest.MonkeyPatch.context() as patch:
        search_little(patch)
        yield


@pytest.fixture
def registered(monkeypatch):
    """The simulated kernel as an installed distribution declares one: a log names kernels, and resumes by name."""
    point = EntryPoint("simulated.mm", "mamf.testing:SimulatedMatmul", discovery.MATMUL_KERNEL_GROUP)
    others = discovery.find_entry_points

    def points(group):
        return [*others(group=group), *([point] if group == discovery.MATMUL_KERNEL_GROUP else [])]

    monkeypatch.setattr(discovery, "find_entry_points", points)


@pytest.fixture(scope="session")
def library_logs(tmp_path_factory):
    """A folder of a log of each kind, written by the library."""
    folder = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        library.install(monkeypatch)
        library.write_logs(folder)
    return folder


@pytest.fixture
def machine(library_logs, tmp_path, monkeypatch):
    """In a folder with those logs, on a machine whose accelerator is simulated."""
    library.install(monkeypatch)
    shutil.copytree(library_logs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def sweep_records(tmp_path_factory):
    shapes = ["4096x8192x16384", "16384x8192x4096", "4096x16384x16384", "16384x16384x16384"]
    regimes = ["--regime", "burst", "sustained"]
    return measured(tmp_path_factory.mktemp("sweep"), "sweep", *SIMULATED, "--shapes", *shapes, *regimes)


@pytest.fixture(scope="session")
def find_records(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("find"), "find", *SIMULATED)
