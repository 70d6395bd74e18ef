"""Devices that share a run in virtual time: a thread for each in place of a process, in the order of their clocks."""

import heapq
import json
import sys
import threading
from queue import Queue

from mamf.errors import ENDING, describe_error
from mamf.node.children import FAILURE, Event
from mamf.node.sharing import DevicePool, Worker

GONE = None


class Ended(BaseException):
    """The end of a device's process, with its exit code: no handler of mamf's may see it."""

    @property
    def code(self):
        return self.args[0] if self.args else None


ENDING.append(Ended)


class Device:
    """A worker in a thread, which runs from its steps to its end. ``is_gone``: it ends without a word once it has its
    steps; ``hangs``: it never reads them.
    """

    def __init__(self, rank, backend, is_gone, hangs):
        self.rank, self.backend, self.is_gone, self.hangs = rank, backend, is_gone, hangs
        self.lines, self.events, self.is_idle = Queue(), [], threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        try:
            Worker(self.backend, self.send, self.receive).work()
            self.end(0)
        except Ended as end:
            self.end(end.code or -9)
        except Exception as error:
            self.send({FAILURE: describe_error(error)})
            self.end(1)
        self.is_idle.set()

    def send(self, record):
        if isinstance(sys.exception() if hasattr(sys, "exception") else sys.exc_info()[1], Ended):
            return  # a process that was ended sends nothing more
        self.events.append((self.backend.now(), Event(self.rank, json.loads(json.dumps(record)))))

    def receive(self):
        self.is_idle.set()
        line = self.lines.get()
        if line is GONE or self.is_gone:
            raise Ended
        return line

    def end(self, code):
        self.events.append((self.backend.now(), Event(self.rank, None, code)))

    def kill(self):
        self.lines.put(GONE)

    terminate = kill


class VirtualChildren:
    """As Children: the next event is the earliest of all, once every device waits or has ended."""

    def __init__(self, backends, gone, hangs):
        self.processes = {
            rank: Device(rank, backend, rank in gone, rank in hangs) for rank, backend in backends.items()
        }
        self.time, self._due, self._number = 0.0, [], 0

    def next(self, seconds):
        for device in self.processes.values():
            device.is_idle.wait()
            for moment, event in device.events:
                self._number += 1
                heapq.heappush(self._due, (moment, self._number, event))
            device.events = []
        if not self._due:
            self.time += seconds
            return None
        moment, _, event = heapq.heappop(self._due)
        self.time = max(self.time, moment)
        return event

    def send(self, rank, line):
        device = self.processes[rank]
        if device.hangs:
            return
        device.backend.host_time = max(device.backend.host_time, self.time)
        device.is_idle.clear()
        device.lines.put(line)

    def dismiss(self):
        for device in self.processes.values():
            device.kill()

    def __exit__(self, *raised):
        for device in self.processes.values():
            device.thread.join(10)


def install(patch, backends, gone=(), hangs=()):
    """Pools are of these simulated devices, by index; returns a list that the children of each are added to."""
    made = []

    def started(pool):
        made.append(VirtualChildren({rank: backends(rank) for rank in pool.devices}, gone, hangs))
        pool.watch.now = lambda: made[-1].time
        pool.watch.go_on(pool.devices, "")
        return made[-1]

    patch.setattr(DevicePool, "_started", started)
    return made
