"""Provide the fixtures that several test files share."""

import shutil
from importlib.metadata import EntryPoint

import library
import pytest
from contribution_logs import SIMULATED, measured, search_little

from mamf.plugins import discovery


@pytest.fixture(scope="session", autouse=True)
def few_shapes():
    """Limit every search to a few shapes, because only test_search.py tests how well mamf searches whole grids."""
    with pytest.MonkeyPatch.context() as patch:
        search_little(patch)
        yield


@pytest.fixture
def registered(monkeypatch):
    """Register the simulated kernel under a name, as an installed distribution would. A log stores the names of its
    kernels, and a resumed run loads the kernels by name.
    """
    point = EntryPoint("simulated.mm", "mamf.testing:SimulatedMatmul", discovery.MATMUL_KERNEL_GROUP)
    find_installed_entry_points = discovery.find_entry_points

    def find_entry_points(group):
        return [*find_installed_entry_points(group=group), *([point] if group == discovery.MATMUL_KERNEL_GROUP else [])]

    monkeypatch.setattr(discovery, "find_entry_points", find_entry_points)


@pytest.fixture(scope="session")
def library_logs(tmp_path_factory):
    """Return a folder with the logs that ``library.write_logs`` writes. They cover several kinds of runs."""
    folder = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        library.install(monkeypatch)
        library.write_logs(folder)
    return folder


@pytest.fixture
def machine(library_logs, tmp_path, monkeypatch):
    """Change to a folder with a copy of ``library_logs``, and make the simulated accelerator the only accelerator."""
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
