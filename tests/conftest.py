import os

import pytest
from hypothesis import settings

from mamf.testing import SimulatedBackend

# Two cores: torch's threads and the tests' own share them.
os.environ.setdefault("OMP_NUM_THREADS", "2")

# No test asserts on the wall clock, hypothesis's included.
settings.register_profile("mamf", deadline=None)
settings.load_profile("mamf")


@pytest.fixture
def backend():
    return SimulatedBackend()


@pytest.fixture
def on_launch(monkeypatch):
    """Install a hook that every simulated backend calls with its number of launches."""

    def install(hook):
        monkeypatch.setattr(SimulatedBackend, "on_launch", staticmethod(hook))

    return install
