"""Test mamf commands on an emulated device that no file of mamf names (emulated/emulated_device.py).

torch knows the device as PrivateUse1. Each command runs in a separate process, where torch loads the device by its
entry point, as it loads a vendor's package. Run these tests with ``python -m pytest -m emulated``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no PrivateUse1 in Python; torch 2.10 and newer have",
    ),
]
SOURCES = Path(__file__).parent / "emulated"
SMALL = "128x128x128"
# The emulated device computes on the host, which is slow. So let ``mamf find`` try few shapes, and measure the device's
# traits only briefly.
BRIEFLY = """
import sys
from mamf.cli import main
from mamf.engine import traits
from mamf.engine.search.strategy import GridSearchStrategy
GridSearchStrategy.max_distant_shapes = 1
traits._WAKE_UP_ROUND_COUNT, traits._LOAD_SECONDS, traits._COPIED_TOTAL_MIB = 1, 0.2, (1, 2, 4, 8)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the environment variables of a process in which the package of the emulated device is installed."""
    folder = tmp_path_factory.mktemp("installed") / "emulated_device-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-device\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\ntoy = emulated_device:register\n")
    cache = tmp_path_factory.mktemp("cache")
    paths = os.pathsep.join(map(str, (SOURCES, folder.parent)))
    return {**os.environ, "PYTHONPATH": paths, "MAMF_CACHE": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture
def mamf(installed, tmp_path):
    """Return a function that runs a mamf command with the emulated device. ``briefly``: see BRIEFLY."""

    def run(*arguments, briefly=True):
        start = ["-c", BRIEFLY] if briefly else ["-m", "mamf"]
        return subprocess.run(
            [sys.executable, *start, *arguments], env=installed, cwd=tmp_path, capture_output=True, text=True
        )

    run.folder = tmp_path
    return run


def rows(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return records[0], [record for record in records if record["record"] == "measurement"]


def test_it_is_listed_and_chosen_before_the_cpu(mamf):
    listed = mamf("backends").stdout
    assert "accelerator device 0: Toy 1" in listed
    doctor = mamf("doctor").stdout
    assert doctor.startswith("Toy 1 (accelerator:0), timed by host clock")
    assert "events of the device do not work" in doctor
    assert "wake-up: " in doctor and "reaction to load: " in doctor and "cache: " in doctor


def test_sweep_and_show(mamf):
    done = mamf("sweep", "--shapes", SMALL, "256x128x64", "--dtype", "fp32", "--regime", "burst", "--output", "s.jsonl")
    assert done.returncode == 0, done.stderr
    assert "how the speed of Toy 1 changes" in done.stderr
    header, measured = rows(mamf.folder / "s.jsonl")
    assert (header["device"]["name"], header["timer"]) == ("Toy 1", "host clock")
    assert header["traits"]["burst"]["train_seconds"] > 0
    assert [row["status"] for row in measured] == ["ok", "ok"]
    shown = mamf("show", "s.jsonl")
    assert shown.stdout and shown.stdout in done.stdout


def test_find(mamf):
    done = mamf("find", "--quick", "--budget", "6s", "--dtype", "fp32", "--output", "f.jsonl")
    assert done.returncode == 0, done.stderr
    assert rows(mamf.folder / "f.jsonl")[1]


def test_attention(mamf):
    small = ("--seq-lens", "64", "--heads", "2", "--batch", "1", "--head-dims", "32", "--dtype", "fp32")
    done = mamf("attention", *small, "--kernel", "sdpa", "eager", "--no-ceiling", "--output", "a.jsonl")
    assert done.returncode == 0, done.stderr + done.stdout
    _header, measured = rows(mamf.folder / "a.jsonl")
    assert {(row["kernel"], row["status"]) for row in measured} == {("sdpa", "ok"), ("eager", "ok")}


def test_node(mamf):
    done = mamf("node", "--backend", "accelerator", "--budget", "3s", "--dtype", "fp32", "--output-folder", "n")
    # On a busy host there may not be enough time for every ceiling, which makes the verdict UNKNOWN (exit code 3). A
    # CRITICAL verdict would be a bug.
    assert done.returncode in (0, 1, 3) and "CRITICAL" not in done.stdout, done.stdout + done.stderr
    assert "device 0" in done.stdout
    header, measured = rows(next((mamf.folder / "n").glob("*find.jsonl")))
    assert header["traits"]
    assert {row["status"] for row in measured} <= {"ok"}


def test_profile_waits_for_the_device(mamf):
    """Profile a script on a machine with the emulated device.

    The model is on the CPU, because torch cannot make parameters on the emulated device.
    """
    (mamf.folder / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(9):\n"
        "    model(torch.ones(8, 64)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    done = mamf("profile", "--warmup", "1", "--output", "p.jsonl", "train.py", briefly=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "3 steps" in done.stdout
