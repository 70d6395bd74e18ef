"""Test the generic adapter, and the measurement of traits that replaces constants of adapters, on a real device."""

import sys

import pytest
from this_accelerator import ACCELERATOR

from mamf.engine.traits import measure_traits
from mamf.plugins.discovery import load_backend_class
from mamf.testing import BackendContract


class Unclaimed(load_backend_class("accelerator")):
    """The generic adapter, which here also accepts devices that have a dedicated adapter."""

    @classmethod
    def find_dedicated_backend(cls, device_type):
        return None


@pytest.fixture(scope="module")
def generic():
    if reason := Unclaimed.explain_unavailability():
        pytest.skip(str(reason))
    return Unclaimed(ACCELERATOR.index)


class TestGenericBackend(BackendContract):
    @pytest.fixture
    def backend(self, generic):
        return generic


def test_the_generic_adapter_agrees_with_the_dedicated_adapter(generic):
    assert generic.info.name == ACCELERATOR.info.name
    assert generic.info.memory_bytes == ACCELERATOR.info.memory_bytes
    assert generic.timer == ACCELERATOR.timer, generic.reason_events_are_unusable
    assert generic.default_dtype == ACCELERATOR.default_dtype


def test_measured_traits_are_credible():
    start_time = ACCELERATOR.now()
    traits = measure_traits(ACCELERATOR)
    seconds = ACCELERATOR.now() - start_time
    print(f"{seconds:.1f} s: {traits}", file=sys.stderr)  # pytest -s shows this line
    assert traits.burst_traits.remark == traits.sustained_traits.remark == ""
    assert traits.burst_traits.wake_seconds < 0.05
    assert 0.001 <= traits.burst_traits.train_seconds <= 0.1
    assert seconds < 20
