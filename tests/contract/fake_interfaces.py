"""What the simulated vendors offer, without installing them."""

import inspect

import simulated_vendors


class Installations:
    """Stands in for monkeypatch: keeps what a simulated vendor would install, and installs nothing."""

    def __init__(self):
        self.attributes = {}
        self.modules = {}

    def setattr(self, owner, name, value, raising=True):
        self.attributes[owner, name] = value

    def setitem(self, mapping, name, value):
        self.modules[name] = value

    def delattr(self, *arguments, **options):
        pass

    delenv = delattr


def installations(vendor):
    kept = Installations()
    getattr(simulated_vendors, f"simulate_{vendor}")(kept, [])
    return kept


def parameters(function):
    """The names of a function's parameters, and whether each may be left out."""
    signature = function if isinstance(function, inspect.Signature) else inspect.signature(function)
    return [(each.name, each.default is not each.empty) for each in signature.parameters.values()]
