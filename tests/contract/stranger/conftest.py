import sys

import mamf_layer_norm
import pytest


@pytest.fixture(autouse=True)
def installed(site, monkeypatch):
    """Install the entry points. Other tests remove the module from sys.modules."""
    monkeypatch.setitem(sys.modules, "mamf_layer_norm", mamf_layer_norm)
    monkeypatch.syspath_prepend(site)
