import gc
import os
import signal
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from mamf.cli import main
from mamf.testing import SimulatedBackend

# The processes that run the tests share the cores, so torch's own threads would only compete for the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With LANGUAGE=C, argparse does not look for a translation file for every message, and its messages stay in English, as
# tests expect.
os.environ["LANGUAGE"] = "C"
# Background processes of a shell ignore SIGINT, but these tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Processes under nohup ignore SIGHUP, but tests send it to processes that they start.
if signal.getsignal(getattr(signal, "SIGHUP", signal.SIGINT)) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Imported modules and collected tests are never garbage, so scan them less often.
gc.set_threshold(50_000)

DEVICE_TESTS = Path(__file__).parent / "device"

# No deadline, because tests must not fail on a slow or busy machine. The examples are the same in every run, so that a
# failure can be repeated. tools/attack.py searches for new examples.
settings.register_profile("mamf", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("mamf")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Run the tests of tests/device in one process, because they need the accelerator to themselves.

    Run all other tests on every core.
    """
    test_paths = (Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args)
    if any(path.is_relative_to(DEVICE_TESTS) for path in test_paths):
        config.option.dist = "no"
        return 0
    return None


# For each marker whose tests run only on request: the reason that pytest gives when it skips them.
SKIP_REASONS_BY_MARKER = {
    "docs": "half a minute: python -m pytest -m docs",
    "emulated": "half a minute: python -m pytest -m emulated",
    "browser": "needs a browser, and a minute: python -m pytest -m browser",
}


def pytest_collection_modifyitems(config, items):
    """Skip tests that take long or need a browser, unless -m names their marker."""
    for marker, reason in SKIP_REASONS_BY_MARKER.items():
        if marker not in config.option.markexpr:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """Free the objects that only the collection of tests needed, before ``imported_so_far`` freezes the others."""
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def imported_so_far():
    """Exclude the modules that earlier tests imported, such as torch, from all later garbage collections."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def looked_at_load():
    """Make ``psutil.cpu_percent`` return 3 % at once, and provide the real function.

    Tests then neither wait while psutil measures the load of this host, nor get warnings about a busy host.
    """
    real_cpu_percent = psutil.cpu_percent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "cpu_percent", lambda interval: 3.0)
        yield real_cpu_percent


@pytest.fixture(scope="session", autouse=True)
def unsynchronized():
    """Replace ``os.fsync``, so that tests do not wait for the disk. Their files need not survive a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Set MAMF_CACHE to an empty folder, so that tests neither read nor change the ceilings of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAMF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def small_cache_of_the_host(tmp_path_factory):
    """Pretend that the largest cache of this host's CPU has 1 MiB.

    A server has a cache of hundreds of megabytes, and each measurement in the burst regime would flush all of it.
    """
    caches = tmp_path_factory.mktemp("caches")
    (caches / "index3").mkdir()
    (caches / "index3" / "size").write_text("1M\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mamf_backends.cpu._CACHE_DIRECTORY", caches)
        yield


@pytest.fixture
def backend():
    return SimulatedBackend()


@pytest.fixture
def on_launch(monkeypatch):
    """Return a function that installs a hook. Simulated backends call the hook with their number of launches so far."""

    def install(hook):
        monkeypatch.setattr(SimulatedBackend, "on_launch", staticmethod(hook))

    return install


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs a mamf command in an empty folder, and returns its exit code, stdout and stderr.

    The attribute ``folder`` of the function is the folder.
    """
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments):
        try:
            code = main(list(arguments))
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    run_command.folder = tmp_path
    return run_command
