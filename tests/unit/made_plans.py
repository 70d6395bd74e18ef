"""Build the plans of tests in one line."""

from dataclasses import fields

from mamf.engine.runner import RunSetup
from mamf.operations.matmul.shapes import SearchOptions
from mamf.plans import FIND, MATMUL, SHUFFLED_ORDER, SWEEP, Plan, SweepOptions

_SWEEP_OPTION_NAMES = {field.name for field in fields(SweepOptions)}
_SEARCH_OPTION_NAMES = {field.name for field in fields(SearchOptions)}


def setup_of(plan, kernels, backend, rows=()):
    """Return the setup of a run, from which tests make a strategy: a plan, its kernels and an opened device."""
    return RunSetup(plan, backend, list(zip(plan.kernels, kernels, strict=True)), list(rows))


def sweep_plan(shapes, problem, regimes=("burst",), kernel="torch.mm", **settings):
    """Return a plan that sweeps matmul shapes with one kernel."""
    options = {"order": SHUFFLED_ORDER} | {name: settings.pop(name) for name in _SWEEP_OPTION_NAMES & settings.keys()}
    return Plan(
        SWEEP, MATMUL, (problem,), (kernel,), tuple(shapes), regimes, options=SweepOptions(**options), **settings
    )


def kernels_plan(operation, shapes, problems, kernels, regimes=("burst",), **settings):
    """Return a plan that sweeps shapes of any operation with several kernels."""
    return Plan(SWEEP, operation, tuple(problems), tuple(kernels), tuple(shapes), regimes, **settings)


def search_plan(problem, kernels, grid, regimes=("burst", "sustained"), **settings):
    """Return a plan that searches a grid for the matmul ceilings of a device."""
    options = SearchOptions(grid, **{name: settings.pop(name) for name in _SEARCH_OPTION_NAMES & settings.keys()})
    return Plan(FIND, MATMUL, (problem,), tuple(kernels), regimes=regimes, options=options, **settings)
