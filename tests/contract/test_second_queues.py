"""Test the second queues of real backends (a torch stream, and a thread of the host), and process groups that limit the
number of blocks.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.distributed

from mamf.operations import collective_kernels
from mamf.plugins.discovery import load_backend_class, open_backend


class Vendor:
    """A fake of a vendor's torch module that has only streams.

    ``calls``: the launches and marks with the name of their stream, and which stream waited for which.
    """

    def __init__(self):
        self.calls, self.now = [], "own"

    def Stream(self, index):
        return SimpleNamespace(name="second", wait_stream=lambda other: self.calls.append(("second waits", other.name)))

    def current_stream(self):
        return SimpleNamespace(name="own", wait_stream=lambda other: self.calls.append(("own waits", other.name)))

    @contextmanager
    def stream(self, stream):
        self.now = stream.name
        yield
        self.now = "own"


def test_a_stream_begins_after_a_fork_and_is_waited_for_after_a_join():
    vendor = Vendor()
    module = __import__(load_backend_class("cuda").__mro__[1].__module__, fromlist=["StreamQueue"])
    queue = module.StreamQueue(vendor, 0, lambda: vendor.calls.append(("mark", vendor.now)))
    queue.fork()
    queue.launch(lambda: vendor.calls.append(("launch", vendor.now)))
    queue.record_mark()
    queue.join()
    inside = [("launch", "second"), ("mark", "second")]
    assert vendor.calls == [("second waits", "own"), *inside, ("own waits", "second")]


def test_a_host_runs_its_second_queue_in_order_and_join_raises_what_failed():
    backend = open_backend("cpu")
    queue, ran = backend.get_second_queue(), []
    assert backend.get_second_queue() is queue
    before = queue.record_mark()
    queue.launch(lambda: ran.append(1))
    queue.launch(lambda: ran.append(2))
    after = queue.record_mark()
    queue.join()
    assert ran == [1, 2]
    assert backend.compute_seconds_between(before, after) >= 0
    queue.launch(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        queue.join()
    queue.join()  # the error is raised only once


def test_blocks_are_options_of_a_fresh_group(monkeypatch):
    class Library:
        class Options:
            config = None

            def __init__(self):
                self.config = SimpleNamespace()

    made = []
    world = SimpleNamespace(_get_backend=lambda device: Library())
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(torch.distributed, "new_group", lambda **given: made.append(given) or "a group")
    collective_kernels.make_process_group.cache_clear()
    assert collective_kernels.make_process_group(0, "cpu") is None
    assert [collective_kernels.make_process_group(8, "cpu") for _ in range(2)] == ["a group"] * 2
    (given,) = made
    assert vars(given["pg_options"].config) == {"min_ctas": 8, "max_ctas": 8}
    collective_kernels.make_process_group.cache_clear()
