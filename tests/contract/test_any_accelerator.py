"""Test the generic backend ``accelerator``: what it reads from a vendor's module, and which timer it chooses."""

import sys
from types import SimpleNamespace

import pytest
import torch

from mamf.backend import MIB
from mamf.errors import UnavailableError
from mamf.plugins.discovery import list_backend_statuses, load_backend_class, open_backend

GB = 10**9


def find_status(name="accelerator"):
    return next(each for each in list_backend_statuses() if each.name == name)


def test_each_device_has_its_own_name_and_properties(accelerator):
    assert find_status().device_names == ("Ascend910B2", "Ascend910B3")
    info = accelerator.kind(1).info
    assert (info.name, info.vendor, info.compute_units) == ("Ascend910B3", "npu", 24)
    assert (info.memory_bytes, info.cache_bytes) == (64 * GB, 192 * MIB)
    assert info.uuid_hash


def test_auto_tries_the_generic_backend_after_all_others_but_before_the_cpu(accelerator, monkeypatch):
    assert open_backend("auto").name == "accelerator"
    monkeypatch.setattr(load_backend_class("cuda"), "explain_unavailability", classmethod(lambda kind: None))
    monkeypatch.setattr(load_backend_class("cuda"), "count_devices", classmethod(lambda kind: 1))
    monkeypatch.setattr(load_backend_class("cuda"), "read_device_name", classmethod(lambda kind, index: "NVIDIA H100"))
    names = [each.name for each in list_backend_statuses() if each.unavailability is None]
    assert names == ["cuda", "accelerator", "cpu"]


def test_a_device_that_has_a_backend_is_left_to_this_backend(accelerator, monkeypatch):
    xpu = load_backend_class("xpu")
    monkeypatch.setattr(xpu, "device_type", "npu")
    assert find_status().unavailability is None  # xpu finds no device here
    monkeypatch.setattr(xpu, "explain_unavailability", classmethod(lambda kind: None))
    assert str(find_status().unavailability) == "mamf has a backend for npu devices; use --backend xpu"
    with pytest.raises(UnavailableError, match="mamf has a backend for npu devices"):
        accelerator.kind(0)


@pytest.mark.parametrize(
    ("accelerator_of_torch", "reason"),
    [
        (None, "this torch (1.2) has no torch.accelerator"),
        (SimpleNamespace(is_available=lambda: False), "torch.accelerator sees no device"),
        (SimpleNamespace(), "torch.accelerator sees no device"),
    ],
)
def test_the_generic_backend_says_why_it_is_unavailable(monkeypatch, accelerator_of_torch, reason):
    kind = load_backend_class("accelerator")
    fake_torch = SimpleNamespace(
        __version__="1.2", **({"accelerator": accelerator_of_torch} if accelerator_of_torch else {})
    )
    monkeypatch.setattr(sys.modules[kind.__module__], "torch", fake_torch)
    assert kind.explain_unavailability().reason == reason


# -- timers ------------------------------------------------------------------------------------------------------------


def refuse_timing(event):
    def refuse(end_event):
        raise RuntimeError("Event elapsed_time is not supported")

    event.elapsed_time = refuse
    return event


def halve_elapsed_time(event):
    true_elapsed_time = event.elapsed_time
    event.elapsed_time = lambda end_event: true_elapsed_time(end_event) / 2
    return event


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (refuse_timing, "events of the device do not work: RuntimeError: Event elapsed_time is not supported"),
        (halve_elapsed_time, "events measure 16 ms for work that takes 34 ms"),
        (None, "events of the device do not work: TypeError"),
        (lambda event: event.without_arguments(), "events of the device do not work: AttributeError"),
    ],
)
def test_events_that_cannot_time_are_replaced_by_the_hosts_clock(accelerator, calls, monkeypatch, change, reason):
    event = accelerator.own.Event
    if change is None:
        monkeypatch.delattr(accelerator.own, "Event")
        monkeypatch.setattr(accelerator.torch, "Event", None, raising=False)
    else:
        monkeypatch.setattr(accelerator.own, "Event", lambda enable_timing=False: change(event(enable_timing)))
    backend = accelerator.kind(0)
    assert backend.timer == "host clock"
    (result,) = backend.check_machine()
    assert result.verdict == "warning" and reason in result.finding
    calls.clear()
    start, end = backend.record_mark(), backend.record_mark()
    backend.wait_for_mark(end)
    assert calls == [("synchronize", 0)] * 2
    assert backend.compute_seconds_between(start, end) < 0.001
    assert 0 <= backend.estimate_timer_overhead() < 0.001


class SlowBuffer:
    """A buffer on a simulated device. Each write takes 1 ms, and a read waits until all writes are done."""

    def __init__(self, module):
        self.module, self.pending_milliseconds = module, 0.0

    def zero_(self):
        self.pending_milliseconds += 1.0

    def finish(self):
        self.module.clock += self.pending_milliseconds
        self.pending_milliseconds = 0.0

    def __getitem__(self, part):
        return SimpleNamespace(cpu=self.finish)


@pytest.mark.parametrize("does_wait", [True, False])
def test_a_synchronize_that_does_not_wait_is_refused(accelerator, monkeypatch, does_wait):
    backend = accelerator.kind(0)
    buffer = SlowBuffer(accelerator.module)
    monkeypatch.setattr(accelerator.torch, "zeros", lambda *size, **options: buffer, raising=False)
    monkeypatch.setattr(accelerator.own, "synchronize", lambda device: buffer.finish() if does_wait else None)
    reference_load = accelerator.reference_load
    if does_wait:
        reference_load(backend)()
        assert buffer.pending_milliseconds >= 20.0
    else:
        with pytest.raises(UnavailableError, match=r"npu devices cannot be timed: synchronize returned after 0.0 ms"):
            reference_load(backend)


# -- features that the backend detects when it opens a device ----------------------------------------------------------


def test_a_vendor_module_with_few_functions_is_enough(accelerator, monkeypatch):
    for name in ("get_device_properties", "mem_get_info", "memory_stats", "max_memory_allocated", "empty_cache"):
        monkeypatch.delattr(accelerator.own, name)
    backend = accelerator.kind(0)
    info = backend.info
    assert (info.name, info.memory_bytes, info.cache_bytes, info.uuid_hash) == ("Ascend910B2", None, None, None)
    assert (backend.read_free_memory_bytes(), backend.read_peak_memory_bytes(), backend.read_bus_address()) == (
        None,
        None,
        None,
    )
    backend.reset_peak_memory()
    backend.release_cached_memory()


def test_the_default_dtype_is_the_first_that_multiplies(accelerator, monkeypatch):
    def mm(a, b):
        if a.dtype != torch.float16:
            raise RuntimeError("not implemented")
        return a

    assert accelerator.kind(0).default_dtype == "bfloat16"
    monkeypatch.setattr(accelerator.torch, "mm", mm, raising=False)
    assert accelerator.kind(0).default_dtype == "float16"


@pytest.mark.parametrize("has_generator", [True, False])
def test_operands_are_random_with_and_without_a_generator_on_the_device(accelerator, monkeypatch, has_generator):
    if not has_generator:
        monkeypatch.setattr(accelerator.torch, "Generator", lambda device: torch.Generator("nowhere"), raising=False)
    backend = accelerator.kind(0)
    operand = backend.make_operand_pool("normal", 0).take_buffer("a", 4096, "float32")
    assert operand.std() == pytest.approx(1.0, rel=0.1)
    repeated_operand = backend.make_operand_pool("normal", 0).take_buffer("a", 4096, "float32")
    assert torch.equal(operand, repeated_operand)
