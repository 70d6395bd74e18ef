"""Test adapters and simulated sensors against the interfaces of vendors' libraries in vendor_interfaces.json.

``python tools/check_fakes.py`` reads the wheels of the libraries, and prints how they differ from this file.
"""

import inspect
import json
import sys
from enum import IntEnum

import attention_fakes
import check_fakes
import pytest
from adapter_uses import list_all_uses
from fake_interfaces import installations, parameters

LIBRARIES = {"pynvml": "cuda", "amdsmi": "rocm", "pyhlml": "hpu"}
SNAPSHOT = json.loads(check_fakes.SNAPSHOT.read_text())
USES = list_all_uses()


def get_fake(library):
    return installations(LIBRARIES[library]).modules[library]


# -- the vendors' libraries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [*LIBRARIES, *check_fakes.TORCH_MODULES])
def test_the_library_has_all_names_that_the_adapters_use(library):
    assert check_fakes.group_by_name(USES, library)
    assert list(check_fakes.find_mismatches(USES, library, SNAPSHOT[library])) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_call_of_each_recorded_function_is_found_in_the_adapters(library):
    """Check that tools/adapter_uses.py finds each call. It sees calls through a helper only if it lists the helper."""
    called = {use.path for use in USES if use.arguments is not None}
    assert {f"{library}.{name}" for name in SNAPSHOT[library]["functions"]} <= called


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_fake_has_the_functions_that_are_used_and_their_parameters(library):
    declared = {
        name: parameters(check_fakes.make_signature(function["parameters"]))
        for name, function in SNAPSHOT[library]["functions"].items()
    }
    offered = {name: parameters(inspect.signature(answer))[1:] for name, answer in get_fake(library).answers.items()}
    assert offered == declared


@pytest.mark.parametrize("library", check_fakes.TORCH_MODULES)
def test_the_fake_of_a_torch_module_accepts_the_calls_of_the_adapters(library, accelerator):
    for name, function in SNAPSHOT[library]["functions"].items():
        offered = inspect.signature(getattr(accelerator.own, name))
        calls = [use for use in USES if use.path == f"{library}.{name}" and use.arguments is not None]
        assert all(check_fakes.accepts_call(offered, use) for use in calls)
        assert all(check_fakes.accepts_call(check_fakes.make_signature(function["parameters"]), use) for use in calls)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_constants_of_the_fake_have_the_values_of_the_library(library):
    fake = get_fake(library)
    used = {use.path.removeprefix(f"{library}.") for use in USES}
    for path, value in SNAPSHOT[library]["values"].items():
        kind, _, member = path.rpartition(".")
        if path in used or hasattr(fake, kind or path):
            assert (getattr(fake, kind)[member] if kind else getattr(fake, path)) == value
            assert not kind or issubclass(getattr(fake, kind), IntEnum)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_exceptions_of_the_fake_are_unrelated_like_those_of_the_library(library):
    kinds = [getattr(get_fake(library), name) for name in SNAPSHOT[library]["exceptions"]]
    assert [kind.__bases__ for kind in kinds] == [(Exception,)] * len(kinds)


def test_the_fake_of_aiter_has_the_parameters_of_the_release_first(monkeypatch):
    release = check_fakes.make_signature(SNAPSHOT["aiter"]["functions"]["flash_attn_func"]["parameters"])
    attention_fakes.aiter(monkeypatch, [])
    fake = inspect.signature(sys.modules["aiter"].flash_attn_func)
    assert parameters(fake)[: len(release.parameters)] == parameters(release)


def test_the_fakes_refuse_calls_that_the_libraries_would_refuse(cuda, rocm):
    with pytest.raises(TypeError):
        cuda.nvml.nvmlDeviceGetClockInfo(cuda.nvml.cards[0])
    with pytest.raises(AttributeError):
        rocm.smi.amdsmi_get_power()
