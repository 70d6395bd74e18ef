import sys

import mamf_layer_norm
import pytest


@pytest.fixture(autouse=True)
def installed(site, monkeypatch):
    """Install the module and its entry points.

    Put the module into ``sys.modules``, because other tests remove it from there.
    """
    monkeypatch.setitem(sys.modules, "mamf_layer_norm", mamf_layer_norm)
    monkeypatch.syspath_prepend(site)
