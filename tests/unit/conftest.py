"""Fixtures that several tests share."""

import pytest
from contribution_logs import SIMULATED, measured


@pytest.fixture(scope="session")
def sweep_records(tmp_path_factory):
    shapes = ["512x1024x2048", "2048x1024x512", "1024x4096x4096", "4096x4096x4096"]
    regimes = ["--regime", "burst", "sustained"]
    return measured(tmp_path_factory.mktemp("sweep"), "sweep", *SIMULATED, "--shapes", *shapes, *regimes)


@pytest.fixture(scope="session")
def find_records(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("find"), "find", *SIMULATED)
