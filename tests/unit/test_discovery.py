"""Test how mamf finds and loads backends, kernels and operations, its own and those of third parties."""

import sys
import textwrap

import pytest

from mamf.errors import PluginError, UnavailableError, UsageError
from mamf.operations.matmul.operation import choose_matmul_kernel
from mamf.operations.matmul.shapes import MatmulProblem
from mamf.plugins import discovery
from mamf.plugins.discovery import (
    find_entry_points_by_name,
    list_backend_statuses,
    load_backend_class,
    make_kernel,
    make_operation,
    open_backend,
)


@pytest.fixture
def install_distribution(tmp_path, monkeypatch):
    """Return a function that installs a third party's distribution, which declares one backend."""

    def install(package, name, value, source=""):
        (tmp_path / f"{package}.py").write_text(textwrap.dedent(source))
        metadata_folder = tmp_path / f"{package}-1.0.dist-info"
        metadata_folder.mkdir()
        (metadata_folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata_folder / "entry_points.txt").write_text(f"[mamf.backends]\n{name} = {value}\n")
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return install


def test_a_third_partys_backend_is_found_and_opened(install_distribution, run):
    source = """
        from mamf.testing import SimulatedBackend
        class NpuBackend(SimulatedBackend):
            name = "npu"
    """
    install_distribution("mamf_npu", "npu", "mamf_npu:NpuBackend", source)
    assert open_backend("npu").name == "npu"
    code, out, _ = run("backends")
    assert code == 0
    assert "npu         device 0: Simulated H100" in out


def test_auto_prefers_an_accelerator(install_distribution):
    source = """
        from mamf.testing import SimulatedBackend
        class NpuBackend(SimulatedBackend):
            name = "npu"
    """
    install_distribution("mamf_npu", "npu", "mamf_npu:NpuBackend", source)
    statuses = list_backend_statuses()
    assert statuses[-1].name == "cpu"
    first_available = next(status for status in statuses if status.unavailability is None)
    assert open_backend("auto").name == first_available.name != "cpu"


def test_an_error_about_a_name_of_two_distributions_names_both(install_distribution):
    install_distribution("mamf_rival", "cpu", "mamf_rival:Rival")
    with pytest.raises(UsageError, match=r"'cpu' of mamf.backends is defined by .*(mamf.*mamf_rival|mamf_rival.*mamf)"):
        find_entry_points_by_name(discovery.BACKEND_GROUP)


def test_an_entry_point_whose_file_is_gone_says_what_to_run(install_distribution):
    install_distribution("mamf_stale", "stale", "mamf_stale.moved:Backend")
    with pytest.raises(PluginError, match=r"pip install -e \."):
        load_backend_class("stale")
    assert any(status.name == "stale" and status.unavailability for status in list_backend_statuses())


def test_an_uninstalled_checkout_says_which_command_installs_it(monkeypatch):
    monkeypatch.setattr(discovery, "find_entry_points", lambda group: [])
    with pytest.raises(UsageError, match=r"not installed.*pip install -e \."):
        find_entry_points_by_name(discovery.BACKEND_GROUP)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "name"),
    [("float32", "float32", "torch.mm"), ("float8_e4m3fn", "bfloat16", "scaled_mm"), ("int8", "int32", "int_mm")],
)
def test_the_kernel_follows_from_the_dtype(dtype, out_dtype, name):
    assert choose_matmul_kernel(open_backend("cpu"), MatmulProblem(dtype, out_dtype)).name == name


def test_when_no_kernel_fits_the_most_specific_reason_is_given():
    backend = open_backend("cpu")
    with pytest.raises(UnavailableError, match="CPUs have no tf32"):
        choose_matmul_kernel(backend, MatmulProblem("tf32", "float32"))
    with pytest.raises(UnavailableError, match="layout nt, not nn"):
        choose_matmul_kernel(backend, MatmulProblem("float8_e4m3fn", "bfloat16", "nn"))


def test_a_class_path_finds_modules_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_module_here.py").write_text(
        "from mamf.testing import SimulatedMatmul\nclass Mine(SimulatedMatmul):\n    name = 'mine.mm'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert make_kernel(make_operation("matmul"), "my_module_here:Mine").name == "mine.mm"
    assert sys.path[-1] == str(tmp_path)
