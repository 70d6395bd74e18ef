"""Test the second queues of real backends (a torch stream, and a thread of the host), and process groups that limit the
number of blocks.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.distributed

from mamf.operations import collective_kernels
from mamf.plugins.discovery import load_backend_class, open_backend


class FakeVendorModule:
    """A fake of a vendor's torch module that has only streams.

    ``calls``: the launches and marks with the name of their stream, and which stream waited for which.
    """

    def __init__(self):
        self.calls, self.current_name = [], "default"

    def Stream(self, index):
        return SimpleNamespace(name="second", wait_stream=lambda other: self.calls.append(("second waits", other.name)))

    def current_stream(self):
        return SimpleNamespace(
            name="default", wait_stream=lambda other: self.calls.append(("default waits", other.name))
        )

    @contextmanager
    def stream(self, stream):
        self.current_name = stream.name
        yield
        self.current_name = "default"


def test_a_second_stream_waits_at_a_fork_and_the_default_stream_waits_at_a_join():
    vendor = FakeVendorModule()
    module = __import__(load_backend_class("cuda").__mro__[1].__module__, fromlist=["StreamQueue"])
    queue = module.StreamQueue(vendor, 0, lambda: vendor.calls.append(("mark", vendor.current_name)))
    queue.fork()
    queue.launch(lambda: vendor.calls.append(("launch", vendor.current_name)))
    queue.record_mark()
    queue.join()
    calls_in_second_stream = [("launch", "second"), ("mark", "second")]
    assert vendor.calls == [("second waits", "default"), *calls_in_second_stream, ("default waits", "second")]


def test_a_host_runs_its_second_queue_in_order_and_join_raises_the_error_of_a_launch():
    backend = open_backend("cpu")
    queue, finished_launches = backend.get_second_queue(), []
    assert backend.get_second_queue() is queue
    first_mark = queue.record_mark()
    queue.launch(lambda: finished_launches.append(1))
    queue.launch(lambda: finished_launches.append(2))
    last_mark = queue.record_mark()
    queue.join()
    assert finished_launches == [1, 2]
    assert backend.compute_seconds_between(first_mark, last_mark) >= 0
    queue.launch(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        queue.join()
    queue.join()  # the error is raised only once


def test_a_limit_of_blocks_is_an_option_of_a_new_process_group(monkeypatch):
    class FakeLibrary:
        class Options:
            config = None

            def __init__(self):
                self.config = SimpleNamespace()

    group_options = []
    world = SimpleNamespace(_get_backend=lambda device: FakeLibrary())
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(torch.distributed, "new_group", lambda **options: group_options.append(options) or "a group")
    collective_kernels.make_process_group.cache_clear()
    assert collective_kernels.make_process_group(0, "cpu") is None
    assert [collective_kernels.make_process_group(8, "cpu") for _ in range(2)] == ["a group"] * 2
    (options,) = group_options
    assert vars(options["pg_options"].config) == {"min_ctas": 8, "max_ctas": 8}
    collective_kernels.make_process_group.cache_clear()
