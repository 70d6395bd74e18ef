"""The operation ``matmul``, the base class of operations that consist of matmuls, and the choice of matmul kernels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, ClassVar

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import DTYPES, canonicalize_dtype_name
from mamf.errors import UnavailableError, UnknownNameError, UnsupportedError, UsageError, require_values
from mamf.measurement import Measurement
from mamf.operation import FlopOperation, Parameter, Preset, draw_sizes
from mamf.operations.matmul.shapes import (
    LAYOUT_BY_LAYER_PASS,
    MATMUL_LAYOUTS,
    PADDING_SUFFIXES,
    PRESETS,
    MatmulKernel,
    MatmulProblem,
    MatmulShape,
    ProductProblemT,
    ProductShapeT,
)
from mamf.plans import CLASSIC, KERNEL_REGIMES
from mamf.plugins.discovery import choose_kernels, is_path, load_registered_kernels, make_kernel, skip_if_broken

# A share of random products is deep: few outputs and a long K, which libraries divide among compute units. Two of three
# have a K of which cuBLAS 13.1.0 leaves out the last 8 terms on an H100 or H200. Other versions do so at other lengths:
# https://github.com/facebookexperimental/triton/pull/2767
_LONG_K_SHARE, _KNOWN_FAULTY_KS, _LONG_KS = 0.25, (12680, 16648, 20488, 24584), range(8192, 65536 + 1, 8)
_LONG_K_ROWS_AND_COLUMNS = (16, 32, 64, 128, 512)


class ProductOperation(FlopOperation[ProductProblemT, ProductShapeT]):
    """Base class of single, batched and grouped matmul."""

    gives_tensors = True
    reference = (
        "A (B x) for random x without a matmul library, int8 in int32, float32 and float64 in float64, all others "
        "in float32; 256 entries by the host in float64"
    )

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> ProductProblemT:
        """Return the problem, as in Operation. The output dtype defaults to that of the operand dtype."""
        operand = backend.resolve_dtype(canonicalize_dtype_name(asked.get("dtype") or backend.default_dtype))
        output = asked.get("out_dtype") or DTYPES[operand].default_output_dtype
        if output not in DTYPES:
            output = backend.resolve_dtype(canonicalize_dtype_name(output))
        return super().problem_for(backend, {**asked, "dtype": operand, "out_dtype": output})

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return FLOP per byte, with the minimum bytes of a launch, and the quantization error of a scaled format."""
        error = row.details.get("quantization_error")
        return {"FLOP/byte": row.flop / row.work.nbytes, **({} if error is None else {"quantization error": error})}

    def words(self, problem: ProductProblemT) -> Sequence[str]:
        """Return the fields that differ from the defaults."""
        usual = {**asdict(self.problem_type(problem.dtype)), "out_dtype": DTYPES[problem.dtype].default_output_dtype}
        return [f"{name} {value}" for name, value in asdict(problem).items() if value != usual[name]]

    #: The possible numbers of matmuls in a random problem, if shapes begin with that number; empty for a single matmul.
    random_matmul_counts: ClassVar[tuple[int, ...]] = ()

    def random_case(self, chooser: random.Random, terms: range) -> dict[str, Any]:
        layout, data = (
            chooser.choice(MATMUL_LAYOUTS) + chooser.choice(PADDING_SUFFIXES),
            chooser.choice(("normal", "uniform", "integers", "wide")),
        )
        counts = [chooser.choice(self.random_matmul_counts)] if self.random_matmul_counts else []
        sizes = [
            *chooser.choices(_LONG_K_ROWS_AND_COLUMNS, k=2),
            chooser.choice(chooser.choice((_KNOWN_FAULTY_KS, _KNOWN_FAULTY_KS, _LONG_KS))),
        ]
        if chooser.random() > _LONG_K_SHARE or math.prod(counts + sizes) not in terms:
            sizes = draw_sizes(chooser, 3, terms, *counts)
        return {"layout": layout, "data": data, "shape": self.shape_type(*counts, *sizes)}

    def axis(self, shape: ProductShapeT) -> float:
        return float(shape.flop)


class Matmul(ProductOperation[MatmulProblem, MatmulShape]):
    name = "matmul"
    kernel_group = "mamf.kernels"
    kernel_type = MatmulKernel
    shape_type = MatmulShape
    problem_type = MatmulProblem
    shape_example = "4096x4096x4096"
    own_command = "sweep"
    chart = "shapes"
    compares_kernels = False
    is_compute_roof = True
    regimes = (*KERNEL_REGIMES, CLASSIC)
    preset_parameter = Parameter("preset", str, "linear layers of known models; --m is the number of tokens")
    preset_parameters = (
        Parameter(
            "product",
            str,
            "pass through the preset's layers, which also sets the layout",
            "forward",
            tuple(LAYOUT_BY_LAYER_PASS),
            is_rare=True,
        ),
    )

    def default_shapes(self, backend: Backend) -> Sequence[MatmulShape]:
        return (MatmulShape(4096, 4096, 4096),)

    def presets(self) -> Mapping[str, Preset[MatmulShape]]:
        """Return the matmuls of linear layers of known models, by preset name."""
        return {name: self.preset(name, {}) for name in PRESETS}

    def preset(self, name: str, values: Mapping[str, Sequence[Any]]) -> Preset[MatmulShape]:
        """Return the matmuls of the preset's layers. Values of ``m`` are token counts. Raises UnknownNameError."""
        if name not in PRESETS:
            raise UnknownNameError("preset of matmul (moe is one of --operation grouped)", name, PRESETS)
        (product,) = values.get("product", ("forward",))
        shapes = PRESETS[name].shapes(product, values.get("m"))
        return Preset(shapes, fields={"layout": (LAYOUT_BY_LAYER_PASS[product],)}, taken=("m",))


def problem_for(
    backend: Backend,
    dtype: str | None = None,
    out_dtype: str | None = None,
    layout: str = "nt",
    data: str = "normal",
    seed: int = 0,
    fast_accumulation: bool = False,
) -> MatmulProblem:
    """Make a matmul problem with the defaults of an open backend. ``fp8`` is the 8-bit float that the device supports.

    ``layout``: how A and B are stored; ``nt`` is that of a linear layer. ``data``: normal, uniform, zeros or integers.
    Raises UnknownNameError for unknown names.

    >>> mamf.problem_for(mamf.open_backend(), "bfloat16", layout="nn").out_dtype
    'bfloat16'
    """
    asked = {"dtype": dtype, "out_dtype": out_dtype, "layout": layout, "data": data, "seed": seed}
    return Matmul().problem_for(backend, {**asked, "fast_accumulation": fast_accumulation})


def make_matmul_kernel(name: str) -> MatmulKernel:
    """Return the matmul kernel with this name, such as ``torch.mm``, or one of its algorithms, such as ``cublaslt[3]``.

    Raises UnknownNameError, UsageError if it has no algorithms to choose from, or PluginError if it is broken.
    """
    return make_kernel(Matmul(), name)  # type: ignore[return-value]


def choose_matmul_kernel(backend: Backend, problem: MatmulProblem, name: str = "auto") -> MatmulKernel:
    """Return the named matmul kernel, or for ``auto`` the first default kernel that supports this problem.

    Raises UnavailableError, UnknownNameError or PluginError.
    """
    if name != "auto":
        return choose_kernels(Matmul(), backend, [name])[0][1]  # type: ignore[return-value]
    return _choose_default_kernel(backend, _find_available_kernels(backend, problem, lambda each: each.is_default))


def choose_search_kernels(
    backend: Backend, problem: MatmulProblem, names: Sequence[str] | None = None
) -> list[MatmulKernel]:
    """Return the kernels that a search for a ceiling tries: the named ones, or all that are tried by default.

    Raises UnavailableError, UnknownNameError, UnsupportedError or PluginError if a named kernel cannot be used.
    """
    if names is None:
        usable = _find_available_kernels(backend, problem, lambda each: each.is_default or each.is_tried_unasked)
        others = [each for each, reason in usable if reason is None and each.is_tried_unasked]
        has_default = any(each.is_default and reason is None for each, reason in usable)
        default = others[0] if others and not has_default else _choose_default_kernel(backend, usable)
        return [default, *(other for other in others if other.name != default.name)]
    require_values("kernels", names, str)
    chosen = [choose_matmul_kernel(backend, problem, name) for name in dict.fromkeys(names)]
    for each in chosen:
        reason = each.unsupported(backend, problem)
        if reason:
            raise UnsupportedError(reason)
    return chosen


def _find_available_kernels(
    backend: Backend, problem: MatmulProblem, is_wanted: Callable[[MatmulKernel], bool]
) -> list[tuple[MatmulKernel, str | None]]:
    """Return the available kernels that are wanted, each with why it does not support this problem, or None."""
    found: list[tuple[MatmulKernel, str | None]] = []
    kernels: Any = load_registered_kernels(Matmul())
    for _, each in kernels:
        with skip_if_broken():
            if is_wanted(each) and each.unavailable(backend) is None:
                found.append((each, each.unsupported(backend, problem)))
    return found


def _choose_default_kernel(backend: Backend, usable: Sequence[tuple[MatmulKernel, str | None]]) -> MatmulKernel:
    reasons = []
    for each, reason in usable:
        if each.is_default:
            if reason is None:
                return each
            reasons.append(reason)
    # No kernel supports the problem. The most specific reason comes from a kernel that supports the dtype.
    specific = [reason for reason in reasons if "; it takes" not in reason]
    none = f"no default matmul kernel runs on {backend.name}: name one"
    raise UnavailableError((specific or reasons or [none])[0])


def get_installed_kernel(name: str) -> MatmulKernel:
    """Return the kernel that a log names. Raises UsageError if it is not installed.

    A log may come from anyone, so nothing is imported only because a log names it.
    """
    if not is_path(name):
        with suppress(UnknownNameError):
            return make_matmul_kernel(name)
    raise UsageError(
        f"the log names kernel {name}, which is not installed: install the package that provides it, or name its class "
        "(package.module:Class)"
    )


def get_ceiling_kernels(
    names: Iterable[str], given: Iterable[str] = (), warn: Callable[[str], object] = lambda remark: None
) -> dict[str, MatmulKernel]:
    """Return the kernels that ceilings were measured with, by their names in logs.

    ``given``: kernels that the caller names, such as ``package.module:Class``, for ``names`` that are not installed.
    ``warn``: called with a remark for each kernel that is neither given nor installed. Its ceiling still gives shares,
    but its matmul is not measured with the rows. Raises UsageError for a given kernel that has no ceiling.
    """
    wanted, found = set(names), {each.name: each for each in map(make_matmul_kernel, given)}
    if unused := found.keys() - wanted:
        raise UsageError(
            f"no ceiling was measured with kernel {min(unused)}; the ceilings' "
            f"kernels: {', '.join(sorted(wanted)) or 'none'}"
        )
    for name in sorted(wanted - found.keys()):
        try:
            found[name] = get_installed_kernel(name)
        except UsageError:
            warn(
                f"kernel {name} of the ceiling is not installed, so the drift of the device is not measured: name its "
                "class with --ceiling-kernel package.module:Class"
            )
    return found
