import gc
import os
import signal
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from mamf.cli import main
from mamf.testing import SimulatedBackend

# The processes that run the tests share the cores: threads of torch's own would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# argparse looks for files of translations at every word that it says, and tests read the words.
os.environ["LANGUAGE"] = "C"
# A shell starts what runs in its background deaf to Ctrl-C, and tests press it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The processes that tests start may be hung up on, even if the tests run under nohup.
if signal.getsignal(getattr(signal, "SIGHUP", signal.SIGINT)) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What is imported and collected stays: few collections of garbage go through it.
gc.set_threshold(50_000)

OF_A_DEVICE = Path(__file__).parent / "device"

# No test asserts on the wall clock, hypothesis's included; a run can be repeated, and tools/attack.py searches anew.
settings.register_profile("mamf", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("mamf")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Tests of an accelerator have it to themselves; all others run on every core."""
    asked = (Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args)
    if any(path.is_relative_to(OF_A_DEVICE) for path in asked):
        config.option.dist = "no"
        return 0
    return None


# Marked tests that a plain run skips, with the reason.
APART = {
    "docs": "half a minute: python -m pytest -m docs",
    "emulated": "half a minute: python -m pytest -m emulated",
    "browser": "needs a browser, and a minute: python -m pytest -m browser",
}


def pytest_collection_modifyitems(config, items):
    """Tests that take long, or need a browser, run when their marker is asked for."""
    for marker, reason in APART.items():
        if marker not in config.option.markexpr:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """What made the tests is gone, and the rest stays."""
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def imported_so_far():
    """What earlier tests imported stays too: no collection of garbage goes through all of torch again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def looked_at_load():
    """No test waits to see how busy this host is, nor is warned of it; what really looks is given to who asks."""
    real = psutil.cpu_percent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "cpu_percent", lambda interval: 3.0)
        yield real


@pytest.fixture(scope="session", autouse=True)
def unsynchronized():
    """What tests write need not outlive a loss of power: no test waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """No test leaves a ceiling for the user of this machine, nor finds his."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAMF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def small_cache_of_the_host(tmp_path_factory):
    """A server's cache has hundreds of megabytes, which each burst would flush."""
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
    """Install a hook that every simulated backend calls with its number of launches."""

    def install(hook):
        monkeypatch.setattr(SimulatedBackend, "on_launch", staticmethod(hook))

    return install


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        try:
            code = main(list(arguments))
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    command.folder = tmp_path
    return command
