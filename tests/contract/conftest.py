import pytest
import simulated_vendors


@pytest.fixture
def calls():
    """What the simulated vendor was asked, in order: tuples of a name and arguments."""
    return []


@pytest.fixture
def cuda(monkeypatch, calls):
    return simulated_vendors.simulate_cuda(monkeypatch, calls)


@pytest.fixture
def rocm(monkeypatch, calls):
    return simulated_vendors.simulate_rocm(monkeypatch, calls)


@pytest.fixture
def xpu(monkeypatch, calls):
    return simulated_vendors.simulate_xpu(monkeypatch, calls)


@pytest.fixture
def hpu(monkeypatch, calls):
    return simulated_vendors.simulate_hpu(monkeypatch, calls)


@pytest.fixture
def mps(monkeypatch, calls):
    return simulated_vendors.simulate_mps(monkeypatch, calls)
