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
METADATA_OPERATORS = ("as_strided", "view", "_reshape_alias", "detach", "alias", "_unsafe_view")


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


def to_device(host):
    """Return a tensor of the device over the memory of a host tensor."""
    host_storage = host.untyped_storage()
    device_storage = torch._C._construct_storage_from_data_pointer(
        host_storage.data_ptr(), torch.device(NAME, 0), host_storage.nbytes()
    )
    device_storage.host_storage = host_storage  # keeps the host memory alive as long as the device's storage
    return _make_tensor_over(device_storage, host)


def _make_tensor_over(storage, like):
    return _set_storage(torch._C._acc.create_empty_tensor([0], like.dtype), storage, like)


def _set_storage(tensor, storage, like):
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    return set_.redispatch(HOST, tensor, storage, like.storage_offset(), like.size(), like.stride())


def to_host(tensor):
    """Return a host tensor over the memory of a tensor of the device. Return a tensor of another device unchanged."""
    if tensor.device.type != NAME:
        return tensor
    host = torch.empty(0, dtype=tensor.dtype)
    if not tensor.numel():  # an operator may resize it
        return host.view(tensor.size())
    device_storage = tensor.untyped_storage()
    host_storage = torch._C._construct_storage_from_data_pointer(
        device_storage.data_ptr(), torch.device("cpu"), device_storage.nbytes()
    )
    return host.set_(host_storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def run_on_host(operator, *arguments, **options):
    """Run any operator on host tensors over the memory of its arguments, and return its results as device tensors.

    If an operator returns one of its arguments, as in-place operators do, return that argument. If it returns a view of
    an argument, return a view of the argument's memory.
    """
    lent_tensors = []

    def lend(tensor):
        lent_tensors.append((tensor, to_host(tensor)))
        return lent_tensors[-1][1]

    arguments, options = tree_map_only(torch.Tensor, lend, (arguments, options))
    options = tree_map_only(torch.device, lambda device: torch.device("cpu"), options)
    results = operator(*arguments, **options)

    for tensor, lent in lent_tensors:
        if lent.size() != tensor.size():
            _set_storage(tensor, to_device(lent).untyped_storage(), lent)

    def give_back(host):
        for tensor, lent in lent_tensors:
            if host is lent:
                return tensor
            if (
                tensor.device.type == NAME
                and host.untyped_storage().data_ptr() == lent.untyped_storage().data_ptr() != 0
            ):
                return _make_tensor_over(tensor.untyped_storage(), host)
        return to_device(host)

    return tree_map_only(torch.Tensor, give_back, results)


def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return to_device(torch.empty(size, dtype=dtype, memory_format=memory_format))


def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return to_device(torch.empty_strided(size, stride, dtype=dtype))


def copy_from(source, target, non_blocking=False):
    to_host(target).copy_(to_host(source))
    return target


def make_metadata_operator(overload):
    def run(*arguments, **options):
        return overload.redispatch(HOST, *arguments, **options)

    return run


def register():
    """Register the device in torch. torch calls this entry point when it is imported."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    library = torch.library.Library("aten", "IMPL")
    for name in METADATA_OPERATORS:
        library.impl(name, make_metadata_operator(getattr(torch.ops.aten, name).default), "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("_copy_from_and_resize", copy_from, "PrivateUse1")
    fallback_library = torch.library.Library("_", "IMPL")
    fallback_library.fallback(run_on_host, "PrivateUse1")
    Module.libraries = library, fallback_library  # keeps both alive as long as the process
