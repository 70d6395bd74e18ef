"""Define the operation ``matmul`` and the base class of operations that consist of matmuls, and choose matmul
kernels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, ClassVar

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import DTYPES, canonicalize_dtype_name
from mamf.errors import (
    UnavailableError,
    UnknownNameError,
    UnsupportedError,
    UsageError,
    require_known_names,
    require_nonempty_list,
)
from mamf.measurement import Measurement
from mamf.operation import FlopOperation, Parameter, Preset, draw_sizes
from mamf.operations.matmul.shapes import (
    LAYOUT_BY_LAYER_PASS,
    MATMUL_LAYOUTS,
    MATMUL_PRESETS,
    PADDING_SUFFIXES,
    MatmulKernel,
    MatmulProblem,
    MatmulProblemT,
    MatmulShape,
    MatmulShapeT,
)
from mamf.plans import CLASSIC, COMMON_REGIMES
from mamf.plugins.discovery import (
    choose_kernels,
    is_class_path,
    load_registered_kernels,
    make_kernel,
    open_backend,
    warn_if_plugin_broken,
)

# ``mamf verify`` draws random matmuls. The share _LONG_K_SHARE of them has a small C and a long K. Then libraries
# divide K among compute units, and some libraries have bugs: cuBLAS 13.1.0 on Hopper omits the last 8 terms of a sum if
# K is one of _KNOWN_FAULTY_K_SIZES. Two thirds of the long K are from this list. Other versions of cuBLAS have the bug
# at other K: https://github.com/facebookexperimental/triton/pull/2767
_LONG_K_SHARE, _KNOWN_FAULTY_K_SIZES, _LONG_K_SIZES = 0.25, (12680, 16648, 20488, 24584), range(8192, 65536 + 1, 8)
_LONG_K_M_AND_N_SIZES = (16, 32, 64, 128, 512)


class BaseMatmulOperation(FlopOperation[MatmulProblemT, MatmulShapeT]):
    """The base class of the operations for single, batched and grouped matmuls."""

    returns_tensors = True
    axis_label = "FLOP"
    reference = (
        "A (B x) for random vectors x, computed without a matmul library: in int32 for int8, in float64 for float32 "
        "and float64, in float32 for other dtypes; also 256 entries of C, computed by the host in float64"
    )

    def make_problem(self, backend: Backend, requested_fields: Mapping[str, Any]) -> MatmulProblemT:
        """Make a problem from the fields that the user has set (``requested_fields``), and defaults for the device.

        The default output dtype depends on the operand dtype. Raises UsageError for invalid fields.
        """
        out_dtype = requested_fields.get("out_dtype") or ""
        if out_dtype and out_dtype not in DTYPES:
            out_dtype = backend.resolve_dtype(canonicalize_dtype_name(out_dtype))
        return super().make_problem(backend, {**requested_fields, "out_dtype": out_dtype})

    def make_columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return additional columns of a report: FLOP per byte, where the bytes of each operand count once, and for
        scaled formats the relative error that quantization causes.
        """
        error = row.details.get("quantization_error")
        return {"FLOP/byte": row.flop / row.work.nbytes, **({} if error is None else {"quantization error": error})}

    def list_identifying_fields(self, problem: MatmulProblemT) -> Sequence[str]:
        """Return the fields of a problem that differ from the defaults, each as its name and its value."""
        default_values = {
            **asdict(self.problem_type(problem.dtype)),
            "out_dtype": DTYPES[problem.dtype].default_output_dtype,
        }
        return [f"{name} {value}" for name, value in asdict(problem).items() if value != default_values[name]]

    #: The batch sizes or numbers of experts from which random shapes draw their first size. Empty if shapes have only
    #: M, N and K.
    matmul_counts_for_random_problems: ClassVar[tuple[int, ...]] = ()

    def draw_random_case(self, chooser: random.Random, terms: range) -> dict[str, Any]:
        layout, data = (
            chooser.choice(MATMUL_LAYOUTS) + chooser.choice(PADDING_SUFFIXES),
            chooser.choice(("normal", "uniform", "integers", "wide")),
        )
        counts = (
            [chooser.choice(self.matmul_counts_for_random_problems)] if self.matmul_counts_for_random_problems else []
        )
        sizes = [
            *chooser.choices(_LONG_K_M_AND_N_SIZES, k=2),
            chooser.choice(chooser.choice((_KNOWN_FAULTY_K_SIZES, _KNOWN_FAULTY_K_SIZES, _LONG_K_SIZES))),
        ]
        if chooser.random() > _LONG_K_SHARE or math.prod(counts + sizes) not in terms:
            sizes = draw_sizes(chooser, 3, terms, *counts)
        return {"layout": layout, "data": data, "shape": self.shape_type(*counts, *sizes)}

    def find_axis_position(self, shape: MatmulShapeT) -> float:
        return float(shape.flop)


class MatmulOperation(BaseMatmulOperation[MatmulProblem, MatmulShape]):
    name = "matmul"
    kernel_group = "mamf.kernels"
    kernel_type = MatmulKernel
    shape_type = MatmulShape
    problem_type = MatmulProblem
    shape_example = "4096x4096x4096"
    command_name = "sweep"
    chart_kind = "shapes"
    compares_kernels = False
    sets_compute_ceiling = True
    regimes = (*COMMON_REGIMES, CLASSIC)
    preset_parameter = Parameter(
        "preset",
        str,
        "set of matmul shapes, such as the linear layers of a model; --m sets the number of tokens, by default 8192 "
        "(decode: 1 to 512)",
    )
    preset_parameters = (
        Parameter(
            "product",
            str,
            "which matmul of each layer in --preset to measure: the forward pass, the gradient of the input, or the "
            "gradient of the weight; also sets the layout",
            "forward",
            tuple(LAYOUT_BY_LAYER_PASS),
            is_rare=True,
        ),
    )

    def choose_default_shapes(self, backend: Backend) -> Sequence[MatmulShape]:
        return (MatmulShape(4096, 4096, 4096),)

    def list_presets(self) -> Mapping[str, Preset[MatmulShape]]:
        """Return the presets by name: the matmuls of linear layers of known models."""
        return {name: self.build_preset(name, {}) for name in MATMUL_PRESETS}

    def build_preset(self, name: str, values: Mapping[str, Sequence[Any]]) -> Preset[MatmulShape]:
        """Return a preset: the matmuls of linear layers of known models.

        ``values``: the values of the options ``m`` (numbers of tokens) and ``product`` (``forward``, ``grad-input`` or
        ``grad-weight``). Raises UnknownNameError for an unknown name.
        """
        hint = " (moe needs --operation grouped)" if name.startswith("moe") else ""
        require_known_names((f"preset of matmul{hint}", name, MATMUL_PRESETS))
        (product,) = values.get("product", ("forward",))
        names_by_shape: dict[MatmulShape, list[str]] = {}
        for m in values.get("m") or MATMUL_PRESETS[name].token_counts:
            for layer, n, k in MATMUL_PRESETS[name].layers:
                sizes = {"forward": (m, n, k), "grad-input": (m, k, n), "grad-weight": (n, k, m)}[product]
                names_by_shape.setdefault(MatmulShape(*sizes), []).append(layer)
        shapes = {shape: ", ".join(dict.fromkeys(names)) for shape, names in names_by_shape.items()}
        return Preset(shapes, fields={"layout": (LAYOUT_BY_LAYER_PASS[product],)}, adjustable_sizes=("m",))


def make_problem(
    backend: str | Backend,
    dtype: str | None = None,
    out_dtype: str | None = None,
    layout: str = "nt",
    data: str = "normal",
    seed: int = 0,
    fast_accumulation: bool = False,
) -> MatmulProblem:
    """Make a matmul problem. By default its operands have the default dtype of the backend.

    ``backend``: an open backend, or the name of one, which is then opened.
    ``dtype``, ``out_dtype``: the dtypes of the operands and of C; ``fp8`` is the 8-bit float that the device supports.
    ``layout``: how A and B are stored; ``nt`` is the layout of a linear layer. ``data``: the operands' values:
    ``normal``, ``uniform``, ``zeros``, ``integers`` or ``wide``. Raises UnknownNameError for unknown names.

    >>> mamf.make_problem(mamf.open_backend(), "bfloat16", layout="nn").out_dtype
    'bfloat16'
    """
    backend = open_backend(backend) if isinstance(backend, str) else backend
    operands = {"dtype": dtype, "out_dtype": out_dtype, "layout": layout, "data": data, "seed": seed}
    return MatmulOperation().make_problem(backend, operands | {"fast_accumulation": fast_accumulation})


def make_matmul_kernel(name: str) -> MatmulKernel:
    """Make the matmul kernel with this name, such as ``torch.mm``, or one algorithm of a kernel, such as
    ``cublaslt[3]``.

    Raises UnknownNameError for an unknown name, UsageError if the name has brackets but the kernel has no algorithms,
    or PluginError if the kernel is broken.
    """
    return make_kernel(MatmulOperation(), name)  # type: ignore[return-value]


def choose_matmul_kernel(backend: Backend, problem: MatmulProblem, name: str = "auto") -> MatmulKernel:
    """Return the matmul kernel named ``name``, or for ``auto`` the first default kernel that supports this problem.

    Raises UnavailableError if no such kernel is available, UnknownNameError for an unknown name, or PluginError if the
    kernel is broken.
    """
    if name != "auto":
        return choose_kernels(MatmulOperation(), backend, [name])[0][1]  # type: ignore[return-value]
    return _find_usable_kernels(backend, problem, lambda each: each.is_default)[0]


def choose_search_kernels(
    backend: Backend, problem: MatmulProblem, names: Sequence[str] | None = None
) -> list[MatmulKernel]:
    """Return the kernels that a search for a ceiling (the highest rate of any shape) tries, the default kernel first.

    ``names``: the kernels to try; None: all available kernels that a search tries by default. Raises UnavailableError,
    UnknownNameError, UnsupportedError or PluginError if a named kernel cannot be used.
    """
    if names is None:
        return _find_usable_kernels(backend, problem, lambda each: each.is_default or each.is_tried_by_default)
    require_nonempty_list("kernels", names, str)
    kernels = [choose_matmul_kernel(backend, problem, name) for name in dict.fromkeys(names)]
    for each in kernels:
        if reason := each.explain_unsupported_problem(backend, problem):
            raise UnsupportedError(reason)
    return kernels


def _find_usable_kernels(
    backend: Backend, problem: MatmulProblem, is_wanted: Callable[[MatmulKernel], bool]
) -> list[MatmulKernel]:
    """Return the kernels that run on this backend and support this problem, default kernels first.

    ``is_wanted``: returns whether to consider a kernel. Warn about broken kernels and omit them. Raises
    UnavailableError if no kernel remains.
    """
    kernels_and_rejection_reasons: list[tuple[MatmulKernel, str | None]] = []
    kernels: Any = load_registered_kernels(MatmulOperation())
    for _, each in kernels:
        with warn_if_plugin_broken():
            if is_wanted(each) and each.explain_unavailability(backend) is None:
                kernels_and_rejection_reasons.append((each, each.explain_unsupported_problem(backend, problem)))
    if usable_kernels := [each for each, reason in kernels_and_rejection_reasons if reason is None]:
        return sorted(usable_kernels, key=lambda each: not each.is_default)
    # Prefer the reason of a kernel that supports the dtype, because this reason names the option that is not supported.
    # The reason of a kernel that does not support the dtype contains "; it takes".
    reasons = [reason for each, reason in kernels_and_rejection_reasons if each.is_default and reason]
    reasons.sort(key=lambda reason: "; it takes" in reason)
    raise UnavailableError(
        [*reasons, f"no default matmul kernel runs on backend {backend.name}: choose a kernel with --kernel"][0]
    )


def get_installed_kernel(name: str) -> MatmulKernel:
    """Return the installed kernel that a log names. Raises UsageError if this kernel is not installed.

    If the name is a class path (``package.module:Class``), do not import the module, because the log may come from
    anyone.
    """
    if not is_class_path(name):
        with suppress(UnknownNameError):
            return make_matmul_kernel(name)
    raise UsageError(
        f"the log names kernel {name}, which is not installed: install the package that provides this kernel, or name "
        "the kernel's class with --kernel package.module:Class"
    )


def get_ceiling_kernels(
    ceiling_kernel_names: Iterable[str],
    user_kernel_names: Iterable[str] = (),
    warn: Callable[[str], object] = lambda warning: None,
) -> dict[str, MatmulKernel]:
    """Return the kernels with which the ceilings in a log were measured, by their names in the log.

    The caller measures the ceilings again with these kernels, to see how much the speed of the device has changed.

    - ``ceiling_kernel_names``: the names of these kernels in the log.
    - ``user_kernel_names``: the class paths (``package.module:Class``) that the user gives for kernels that are not
      installed.
    - ``warn``: called with a warning for each kernel that is neither installed nor given by the user. The result omits
      this kernel.

    Raises UsageError if the user gives a kernel with which no ceiling was measured.
    """
    names, kernels = set(ceiling_kernel_names), {each.name: each for each in map(make_matmul_kernel, user_kernel_names)}
    if kernels_without_ceiling := kernels.keys() - names:
        remedy = f"choose one of {', '.join(sorted(names))}" if names else "leave out --ceiling-kernel"
        raise UsageError(f"no ceiling was measured with kernel {min(kernels_without_ceiling)}: {remedy}")
    for name in sorted(names - kernels.keys()):
        try:
            kernels[name] = get_installed_kernel(name)
        except UsageError:
            warn(
                f"kernel {name}, with which the ceiling was measured, is not installed, so the drift of the device is "
                "not measured: name the kernel's class with --ceiling-kernel package.module:Class"
            )
    return kernels
