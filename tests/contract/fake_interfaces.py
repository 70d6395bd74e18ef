"""Read the interfaces of the simulated vendors without installing the simulations."""

import inspect

import simulated_vendors


class InstallationRecorder:
    """A stand-in for monkeypatch that records what a simulated vendor would install, but installs nothing."""

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
    """Return the attributes and modules that the simulation of this vendor would install."""
    recorder = InstallationRecorder()
    getattr(simulated_vendors, f"simulate_{vendor}")(recorder, [])
    return recorder


def parameters(function):
    """Return the name of each parameter of a function or signature, and whether the parameter has a default."""
    signature = function if isinstance(function, inspect.Signature) else inspect.signature(function)
    return [(each.name, each.default is not each.empty) for each in signature.parameters.values()]
