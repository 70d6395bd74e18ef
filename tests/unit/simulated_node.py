"""Simulate a node with several devices, some of them faulty.

Environment variables set the number of devices and their faults, so that child processes see the same node.
"""

import json
import os
import time
from dataclasses import replace
from importlib.metadata import EntryPoint

from mamf.backend import CheckResult
from mamf.engine.search import grid
from mamf.engine.search.grid import plan_search
from mamf.engine.search.rounds import RoundCounts
from mamf.engine.search.strategy import GridSearchStrategy
from mamf.errors import UnavailableError
from mamf.operations.matmul.shapes import MatmulGrid
from mamf.plugins import discovery
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul

FAULTS, DEVICES = "SIMULATED_FAULTS", "SIMULATED_DEVICES"
POINTS = {
    discovery.BACKEND_GROUP: {"simulated": "simulated_node:Node"},
    discovery.MATMUL_KERNEL_GROUP: {"simulated.mm": "simulated_node:NodeMatmul"},
    "mamf.bandwidth_kernels": {"simulated-bandwidth": "mamf.testing:SimulatedBandwidth"},
    "mamf.copy_kernels": {"simulated-copies": "mamf.testing:SimulatedCopies"},
}


class NodeMatmul(SimulatedMatmul):
    is_default = True


class Node(SimulatedBackend):
    """A simulated device, which may have a fault.

    The environment variable named by ``FAULTS`` contains the faults as JSON, by device index. A fault is either an
    object ``{"physics": {...}}`` with arguments of Physics, or what happens when the device is opened: ``"closed"``
    raises an error, ``"gone"`` ends the process, and ``"hangs"`` never returns.
    """

    @classmethod
    def count_devices(cls):
        return int(os.environ.get(DEVICES, "4"))

    def __init__(self, index=0):
        fault = json.loads(os.environ.get(FAULTS, "{}")).get(str(index), {})
        if fault == "closed":
            raise UnavailableError("the device cannot be opened")
        if fault == "gone":
            os._exit(9)
        while fault == "hangs":
            time.sleep(60)
        physics_arguments = fault.get("physics") if isinstance(fault, dict) else None
        super().__init__(index, Physics(**physics_arguments) if physics_arguments else None, seed=index)

    def read_bus_address(self):
        return f"0000:{self.index:02x}:00.0"


def short_plan(*arguments, **options):
    sizes = (8192, 16384)
    plan, kernels = plan_search(*arguments, **options)
    return replace(
        plan, options=replace(plan.options, grid=MatmulGrid(sizes, sizes, sizes), scouts=6, refinements=0)
    ), kernels


def install(patch):
    """Make the simulated node the only accelerator, shorten searches, and skip the checks of host load and checkout."""
    find_other_entry_points = discovery.find_entry_points

    def find_entry_points(group):
        simulated_points = POINTS.get(group)
        if simulated_points is None:
            return find_other_entry_points(group=group)
        return [EntryPoint(name, value, group) for name, value in simulated_points.items()]

    patch.setattr(discovery, "find_entry_points", find_entry_points)
    patch.setattr(GridSearchStrategy, "max_distant_shapes", 1)
    patch.setattr("mamf.node.device.plan_search", short_plan)
    patch.setattr(
        grid,
        "QUICK_SCHEDULE",
        replace(
            grid.QUICK_SCHEDULE, sustained_round_counts=RoundCounts(max_choosing_rounds=0, max_confirming_rounds=3)
        ),
    )
    patch.setattr(GridSearchStrategy, "sustained_visit_candidate_count", 1)
    patch.setattr("mamf.machine.environment._read_checkout_commit", lambda: None)
    patch.setattr("mamf.machine.environment.check_host_load", lambda: CheckResult("host load", "ok", "idle"))
