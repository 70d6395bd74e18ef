import importlib
import sys
from pathlib import Path

import pytest

from mamf.backend import MIB


def simulate(vendor, monkeypatch, calls):
    """Simulate a vendor's device and return its parts.

    The simulations need torch. They are imported only here, so that the process that distributes tests to workers need
    not import torch.
    """
    return getattr(importlib.import_module("simulated_vendors"), f"simulate_{vendor}")(monkeypatch, calls)


@pytest.fixture(scope="session", autouse=True)
def flush_cache():
    """Limit each cache flush to 1 MiB to save time, and provide the real ``TorchBackend.flush_cache``."""
    from mamf.torch_backend import TorchBackend

    real_flush_cache = TorchBackend.flush_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TorchBackend, "flush_cache", lambda backend, size=None: real_flush_cache(backend, min(size or MIB, MIB))
        )
        yield real_flush_cache


@pytest.fixture
def use_one_torch_thread():
    """Limit torch to one thread, because more threads slow down the small shapes of tests."""
    from mamf.operations.operand_sets import use_one_torch_thread as limit_to_one_thread

    with limit_to_one_thread():
        yield


@pytest.fixture
def calls():
    """Return the list to which a simulated vendor appends each call, as a tuple of a name and arguments."""
    return []


@pytest.fixture
def cuda(monkeypatch, calls):
    return simulate("cuda", monkeypatch, calls)


@pytest.fixture
def rocm(monkeypatch, calls):
    return simulate("rocm", monkeypatch, calls)


@pytest.fixture
def xpu(monkeypatch, calls):
    return simulate("xpu", monkeypatch, calls)


@pytest.fixture
def hpu(monkeypatch, calls):
    return simulate("hpu", monkeypatch, calls)


@pytest.fixture
def accelerator(monkeypatch, calls):
    return simulate("accelerator", monkeypatch, calls)


@pytest.fixture
def mps(monkeypatch, calls):
    return simulate("mps", monkeypatch, calls)


@pytest.fixture
def site(tmp_path_factory):
    """Return a folder with the metadata of tests/contract/stranger, including its entry points, as pip writes it."""
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    folder = tmp_path_factory.mktemp("site")
    dist_info = folder / "mamf_layer_norm-1.0.dist-info"
    dist_info.mkdir()
    project = tomllib.loads((Path(__file__).parent / "stranger" / "pyproject.toml").read_text())["project"]
    sections = [
        [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        for group, points in project["entry-points"].items()
    ]
    (dist_info / "entry_points.txt").write_text("\n".join(line for section in sections for line in section) + "\n")
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: mamf-layer-norm\nVersion: 1.0\n")
    return folder
