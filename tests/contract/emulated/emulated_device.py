"""A device "toy" that computes on the host. torch knows it as PrivateUse1, and loads it like a vendor's device.

Its memory is host memory. An operator receives its tensors as host tensors over the same memory, and its results become
tensors of the device. Views stay views. torch itself provides shapes, strides, views, autograd and the dispatcher.
"""

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "toy"
HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# These operators only change or copy sizes and strides. The host's versions can do that for a tensor of any device.
OF_METADATA = ("as_strided", "view", "_reshape_alias", "detach", "alias", "_unsafe_view")


class Module:
    """The module ``torch.toy``, with little more than torch requires.

    It has no events that measure time, no memory statistics and no random number generator.
    """

    def is_initialized(self):
        return True

    def is_available(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, device):
        pass

    def synchronize(self, device=None):
        """Do nothing, because each operator on the host has finished when it returns."""

    def get_device_name(self, device=None):
        return "Toy 1"

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass


def on_device(host):
    """Return a tensor of the device over the memory of a host tensor."""
    memory = host.untyped_storage()
    held = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device(NAME, 0), memory.nbytes())
    held.of_host = memory  # keeps the host memory alive as long as the device's storage
    return _over(held, host)


def _over(storage, like):
    return _set(torch._C._acc.create_empty_tensor([0], like.dtype), storage, like)


def _set(tensor, storage, like):
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    return set_.redispatch(HOST, tensor, storage, like.storage_offset(), like.size(), like.stride())


def on_host(tensor):
    """Return a host tensor over the memory of a tensor of the device. Return a tensor of another device unchanged."""
    if tensor.device.type != NAME:
        return tensor
    made = torch.empty(0, dtype=tensor.dtype)
    if not tensor.numel():  # an operator may resize it
        return made.view(tensor.size())
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device("cpu"), memory.nbytes())
    return made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def run_on_host(operator, *arguments, **options):
    """Run any operator on host tensors over the memory of its arguments, and return its results as device tensors.

    If an operator returns one of its arguments, as in-place operators do, return that argument. If it returns a view of
    an argument, return a view of the argument's memory.
    """
    given = []

    def lend(tensor):
        given.append((tensor, on_host(tensor)))
        return given[-1][1]

    arguments, options = tree_map_only(torch.Tensor, lend, (arguments, options))
    options = tree_map_only(torch.device, lambda device: torch.device("cpu"), options)
    returned = operator(*arguments, **options)

    for tensor, lent in given:
        if lent.size() != tensor.size():
            _set(tensor, on_device(lent).untyped_storage(), lent)

    def give_back(host):
        for tensor, lent in given:
            if host is lent:
                return tensor
            if (
                tensor.device.type == NAME
                and host.untyped_storage().data_ptr() == lent.untyped_storage().data_ptr() != 0
            ):
                return _over(tensor.untyped_storage(), host)
        return on_device(host)

    return tree_map_only(torch.Tensor, give_back, returned)


def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return on_device(torch.empty(size, dtype=dtype, memory_format=memory_format))


def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return on_device(torch.empty_strided(size, stride, dtype=dtype))


def copy_from(source, target, non_blocking=False):
    on_host(target).copy_(on_host(source))
    return target


def on_metadata(overload):
    def run(*arguments, **options):
        return overload.redispatch(HOST, *arguments, **options)

    return run


def register():
    """Register the device in torch. torch calls this entry point when it is imported."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    library = torch.library.Library("aten", "IMPL")
    for name in OF_METADATA:
        library.impl(name, on_metadata(getattr(torch.ops.aten, name).default), "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("_copy_from_and_resize", copy_from, "PrivateUse1")
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run_on_host, "PrivateUse1")
    Module.libraries = library, everything  # keeps both alive as long as the process
