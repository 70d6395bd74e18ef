"""Simulate a device with two queues that slow each other down by known shares, in virtual time."""

from typing import ClassVar

from mamf.backend import SecondQueue
from mamf.operations.overlap import MIN_OVERLAP_SHAPE, WorkPairKernel
from mamf.testing import SimulatedBackend, SimulatedBandwidth, SimulatedCollective, SimulatedCopies, SimulatedMatmul

OWN, ASIDE = "own", "aside"
SIMULATED = {
    "matmul": SimulatedMatmul,
    "collective": SimulatedCollective,
    "copies": SimulatedCopies,
    "bandwidth": SimulatedBandwidth,
}


class Job:
    """A launch, a mark, or a wait for the other queue. Only launches take time.

    ``ready``: the time at which the host queued the job. ``after``: the jobs that must end before this job starts.
    """

    def __init__(self, ready, seconds, after):
        self.ready, self.remaining_seconds, self.after, self.end = ready, seconds, after, None

    def may_start(self):
        return all(job.end is not None for job in self.after)


class SideQueue(SecondQueue):
    def __init__(self, device):
        self.device = device

    def fork(self):
        self.device.add(ASIDE, 0.0, OWN)

    def join(self):
        self.device.add(OWN, 0.0, ASIDE)

    def launch(self, call):
        self.device.current = ASIDE
        call()
        self.device.current = OWN

    def record_mark(self):
        return self.device.add(ASIDE, 0.0)


class TwoQueues(SimulatedBackend):
    """A simulated device with a main queue, ``OWN``, and a second queue, ``ASIDE``.

    ``kept``: the share of its usual rate that each queue keeps while both queues run.
    """

    kept: ClassVar = {OWN: 0.84, ASIDE: 0.71}

    def __init__(self, index=0, **options):
        super().__init__(index, **options)
        self.queued = {OWN: [], ASIDE: []}
        self.last = {OWN: [], ASIDE: []}
        self.current, self.time = OWN, 0.0
        self.aside = SideQueue(self)

    def get_second_queue(self):
        return self.aside

    def add(self, queue, seconds, after=None):
        job = Job(self.host_time, seconds, [*self.last[queue], *(self.last[after] if after else ())])
        self.queued[queue].append(job)
        self.last[queue] = [job]
        return job

    def _run_on_device(self, seconds, watts):
        self.host_time += self.device_physics.host_launch_seconds
        self.add(self.current, seconds)

    def record_mark(self):
        return self.add(self.current, 0.0)

    def compute_seconds_between(self, start, end):
        self.resolve()
        return end.end - start.end

    def wait_for_mark(self, mark):
        self.resolve()
        self.host_time = max(self.host_time, mark.end)

    def is_mark_reached(self, mark):
        self.resolve()
        return mark.end <= self.host_time

    def synchronize(self):
        self.resolve()
        self.host_time = max(self.host_time, self.time)

    def resolve(self):
        """Run all queued jobs and set their end times."""
        while any(self.queued.values()):
            first_jobs = {name: jobs[0] for name, jobs in self.queued.items() if jobs and jobs[0].may_start()}
            running = {name: job for name, job in first_jobs.items() if job.ready <= self.time}
            seconds_until_ready = [job.ready - self.time for job in first_jobs.values() if job.ready > self.time]
            rates = {name: self.kept[name] if len(running) == 2 else 1.0 for name in running}
            if finished := [name for name, job in running.items() if job.remaining_seconds <= 1e-15]:
                for name in finished:
                    self.queued[name].pop(0).end = self.time
                    first_jobs[name].after = []
                continue
            step = min([*seconds_until_ready, *(job.remaining_seconds / rates[name] for name, job in running.items())])
            self.time += step
            for name, job in running.items():
                job.remaining_seconds -= step * rates[name]
        self.device_time = self.time


class SimulatedPair(WorkPairKernel):
    """A pair of simulated kernels, one for each queue.

    ``kernels``: by operation, kernels to use instead of the usual simulated ones.
    """

    def __init__(self, **kernels):
        self.kernel_classes = {**SIMULATED, **kernels}

    def get_timed_kernel(self, backend, problem):
        return self.kernel_classes[problem.get_timed_problem_and_shape(MIN_OVERLAP_SHAPE)[0].operation]()
