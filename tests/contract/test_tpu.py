"""Test the adapter of Google TPUs, which is never available. The reason depends on the installed packages."""

import sys

import pytest

from mamf.errors import UnavailableError
from mamf.plugins.discovery import list_backend_statuses, load_backend_class, open_backend


@pytest.fixture
def explain_with_packages(monkeypatch):
    """Return a function that explains why the backend is unavailable if only the given TPU packages are installed."""

    def explain(**versions):
        monkeypatch.setattr(sys.modules[load_backend_class("tpu").__module__], "get_package_version", versions.get)
        return load_backend_class("tpu").explain_unavailability()

    return explain


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, ["neither with torch_tpu nor with torch_xla"]),
        ({"torch_tpu": "0.2.0"}, ["torch_tpu 0.2.0", "copies to the host"]),
        ({"torch_xla": "2.9.0"}, ["torch_xla 2.9.0", "no events"]),
        ({"torch_tpu": "0.2.0", "torch_xla": "2.9.0"}, ["torch_tpu 0.2.0", "torch_xla 2.9.0"]),
    ],
)
def test_the_reason_names_what_is_installed(explain_with_packages, versions, expected):
    unavailability = explain_with_packages(**versions)
    assert all(part in unavailability.reason for part in expected)
    assert "not possible yet" in unavailability.remedy and "pip install xprof" in unavailability.remedy


def test_it_is_listed_and_cannot_be_opened(explain_with_packages):
    explain_with_packages(torch_tpu="0.2.0")
    (status,) = [status for status in list_backend_statuses() if status.name == "tpu"]
    assert "cannot time a launch" in status.unavailability.reason
    assert status.load_error is None
    for open_named_backend in (open_backend, lambda name: open_backend(name, None)):
        with pytest.raises(UnavailableError, match=r"backend tpu is not available: torch_tpu 0\.2\.0"):
            open_named_backend("tpu")
