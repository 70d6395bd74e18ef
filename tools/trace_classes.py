"""Are kernels of other people's traces put into the right classes? On public traces, which are not kept.

    python tools/trace_classes.py                        # fetches tools/trace_sources.csv from GitHub, by https
    python tools/trace_classes.py --folder DIR           # reads DIR/OWNER/NAME/PATH where it exists, fetches nothing
    python tools/trace_classes.py TRACE...               # these traces
    python tools/trace_classes.py --folder DIR --write FILE.csv    # also the labeled names

A row per trace: busy seconds (the union of all intervals), the share that is unclassified (the bar is 3 %), the share
of kernel time that names alone would leave unclassified, the share that they put into the class that the operation
gives (by intent, products of a convolution and elementwise kernels of an optimizer differ), and the largest classes.

Below them: how many kernel names are right. A label is the class of the operation that launched the kernel, in
``LABELS``; it does not depend on the rules for names. Left out, because such names cannot say the class: names that
operations of several classes launch (a class needs 90 % of the launches), building blocks for any operation (CUB,
rocPRIM), and convolutions by the kernels of products (families of names, by their first three words, that products
launch in any of the traces). tests/unit/data/kernel_names.csv holds a part of the names. 100 of them, chosen by a hash,
were held out while the rules were written.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import tempfile
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mamf.errors import UsageError
from mamf.operations.tracing.classes import UNCLASSIFIED, class_of, class_of_name
from mamf.operations.tracing.events import Event, Trace
from mamf.operations.tracing.shares import class_seconds
from mamf.operations.tracing.traces import read_chrome_trace

_ROOT = Path(__file__).resolve().parents[1]
_SOURCES = _ROOT / "tools/trace_sources.csv"
_NAMES = _ROOT / "tests/unit/data/kernel_names.csv"
_BAR, _MOST_BYTES, _SECONDS, _CLEAR = 0.03, 2**31, 60, 0.9

#: Operations that launch kernels of one class, by class.
LABELS = {
    "attention": "aten::_flash_attention_forward aten::_flash_attention_backward aten::_efficient_attention_forward"
    " aten::_efficient_attention_backward aten::_scaled_dot_product_cudnn_attention"
    " vllm::unified_attention_with_output aiter::mha_batch_prefill",
    "matmul": "aten::mm aten::addmm aten::bmm aten::baddbmm aten::_scaled_mm aten::_int_mm",
    "convolution": "aten::cudnn_convolution aten::cudnn_convolution_backward_input"
    " aten::cudnn_convolution_backward_weight aten::convolution_backward aten::miopen_convolution",
    "normalization": "aten::cudnn_batch_norm aten::cudnn_batch_norm_backward aten::miopen_batch_norm"
    " aten::miopen_batch_norm_backward aten::native_layer_norm aten::native_layer_norm_backward"
    " aten::native_batch_norm aten::native_batch_norm_backward aten::native_group_norm"
    " aten::native_group_norm_backward aten::_fused_rms_norm aten::_fused_rms_norm_backward aiter::_groupnorm_run"
    " aiter::rmsnorm aiter::add_rmsnorm _C::fused_add_rms_norm _C::rms_norm",
    "reduction and softmax": "aten::sum aten::mean aten::var aten::max aten::min aten::argmax aten::all"
    " aten::linalg_vector_norm aten::_softmax aten::_softmax_backward_data aten::_log_softmax"
    " aten::_log_softmax_backward_data aten::nll_loss_forward aten::nll_loss_backward aten::max_pool2d_with_indices"
    " aten::max_pool2d_with_indices_backward aten::_adaptive_avg_pool2d aten::cumsum aten::topk"
    " fbgemm::asynchronous_complete_cumsum fb::asynchronous_complete_cumsum",
    "embedding": "aten::index_select aten::gather aten::scatter_ aten::scatter_add aten::scatter_add_ aten::index"
    " aten::index_add aten::index_add_ aten::index_copy aten::index_copy_ aten::_index_put_impl_ aten::nonzero"
    " fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"
    " torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op> fbgemm::permute_sparse_features"
    " fbgemm::permute_2D_sparse_data fbgemm::permute_pooled_embs_auto_grad",
    "memory copies": "aten::copy_ aten::cat _C_cache_ops::reshape_and_cache_flash sglang::store_cache",
    "elementwise": "aten::add aten::add_ aten::fill_ aten::mul aten::mul_ aten::threshold_backward aten::clamp_min"
    " aten::div aten::div_ aten::threshold_ aten::clamp_min_ aten::sigmoid aten::sub aten::sub_ aten::pow aten::rsqrt"
    " aten::sigmoid_backward aten::tanh aten::neg aten::silu aten::clamp aten::nan_to_num aten::_foreach_add_"
    " aten::_foreach_add aten::_foreach_mul_ aten::gelu aten::sqrt aten::tanh_backward aten::exp_ aten::exp aten::where"
    " aten::log2 aten::log aten::log_ aten::eq aten::arange aten::clamp_ aten::gt aten::le aten::logical_and"
    " aten::masked_fill_ _C::rotary_embedding sgl_kernel::rotary_embedding _C::static_scaled_fp8_quant"
    " sgl_kernel::silu_and_mul aten::ge aten::lt aten::abs aten::normal_ aten::native_dropout aten::rsub aten::logit"
    " aten::logit_backward aten::elu aten::minimum aten::uniform_ aten::addcmul_ aten::sgn aten::floor_divide aten::ne"
    " aten::relu aten::cos aten::sin aten::reciprocal",
    "communication": "nccl:all_reduce nccl:all_to_all nccl:_all_gather_base nccl:broadcast nccl:_reduce_scatter_base"
    " symm_mem::multimem_all_reduce_",
}
_CLASS_OF_OPERATION = {operation: name for name, operations in LABELS.items() for operation in operations.split()}
_BUILDING_BLOCK = re.compile(r"(void )?(\w+::)*(cub|rocprim|hipcub)::")


class Label(NamedTuple):
    """The class of a kernel's name, the operation that launched it most, and a trace that has it."""

    class_name: str
    operation: str
    trace: str


Launches = dict[str, Counter[tuple[str, str]]]


def launches_of(trace: Trace) -> Launches:
    """By kernel name: how often an operation of ``LABELS`` launched it, with the operation's class."""
    found: Launches = defaultdict(Counter)
    for event in trace.events:
        operation = launching_operation(event)
        if event.kind == "kernel" and operation in _CLASS_OF_OPERATION:
            found[event.name][_CLASS_OF_OPERATION[operation], operation] += 1
    return found


def launching_operation(event: Event) -> str:
    """The innermost; NCCL's are annotations."""
    callers = (each for each in event.lineage() if each.kind == "operation" or each.name.startswith("nccl:"))
    return next((each.name for each in callers if each is not event), "")


def label_names(launches: Mapping[str, Launches]) -> dict[str, Label]:
    """The labels of all names in the launches by trace."""
    counts: Launches = defaultdict(Counter)
    traces: dict[str, str] = {}
    for trace, found in launches.items():
        for name, operations in found.items():
            counts[name].update(operations)
            traces.setdefault(name, trace)
    labels = {}
    for name, operations in counts.items():
        by_class: Counter[str] = Counter()
        for (class_name, _), count in operations.items():
            by_class[class_name] += count
        [(first, count)] = by_class.most_common(1)
        if count >= _CLEAR * by_class.total() and not _BUILDING_BLOCK.match(name):
            operation = max((of for of in operations if of[0] == first), key=operations.__getitem__)[1]
            labels[name] = Label(first, operation, traces[name])
    products = {_family(name) for name, label in labels.items() if label.class_name == "matmul"}
    return {
        name: label
        for name, label in labels.items()
        if label.class_name != "convolution" or _family(name) not in products
    }


def _family(name: str) -> tuple[str, ...]:
    """The first three words, without numbers."""
    return tuple(re.sub(r"\d+", "#", word) for word in re.split(r"\W+|_", name) if word)[:3]


def names_alone(trace: Trace) -> tuple[float, float]:
    """Of the seconds of all kernels: what their names alone leave unclassified, and what they put into the class that
    the operation gives.
    """
    total = unknown = same = 0.0
    for event in trace.events:
        if event.kind == "kernel":
            by_name = class_of_name(event.name)
            total += event.seconds
            unknown += event.seconds * (by_name is None)
            same += event.seconds * (by_name == class_of(event))
    return (unknown / total, same / total) if total else (0.0, 1.0)


def print_row(name: str, trace: Trace) -> bool:
    """Print a trace's row, and return whether it is within the bar."""
    seconds = class_seconds(trace)
    busy = sum(seconds.values())
    unclassified = seconds.get(UNCLASSIFIED, 0.0) / busy
    largest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:3]
    text = ", ".join(f"{each} {seconds[each] / busy:.0%}" for each in largest)
    unknown, same = names_alone(trace)
    print(f"{busy:9.5f} s  {unclassified:7.2%} {unknown:7.2%} {same:7.1%}  {text:62}  {name}", flush=True)
    return unclassified < _BAR


def print_accuracy(what: str, labels: Mapping[str, str]) -> None:
    wrong = {name: label for name, label in labels.items() if class_of_name(name) != label}
    if labels:
        right = len(labels) - len(wrong)
        print(f"{what}: {right} of {len(labels)} names are right ({right / len(labels):.2%})")
    for name, label in wrong.items():
        print(f"  {label}, not {class_of_name(name)}: {name[:110]}")


def fetch(repository: str, commit: str, path: str, folder: Path) -> Path:
    """Fetch a file of a public repository. Raises OSError if that fails."""
    url = f"https://raw.githubusercontent.com/{repository}/{commit}/{urllib.request.quote(path)}"
    target = folder / Path(path).name
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
        target.write_bytes(answer.read(_MOST_BYTES))
    return target


def traces(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """The name and the file of each trace; names of those that cannot be had are printed."""
    if options.trace:
        yield from ((str(path), path) for path in options.trace)
        return
    for row in csv.DictReader(_SOURCES.read_text().splitlines()):
        name = f"{row['repository']}/{row['path']}"
        try:
            path = options.folder / name if options.folder else fetch(**row, folder=folder)
        except OSError as error:
            print(f"not fetched ({error}): {name}")
            continue
        if path.exists():
            yield name, path
            path.unlink() if not options.folder else None
        else:
            print(f"not in the folder: {name}")


def write_labels(path: Path, labels: Mapping[str, Label]) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("name", *Label._fields))
        table.writerows((name, *label) for name, label in sorted(labels.items()))


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="*", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args(arguments if arguments is None else list(arguments))
    launches: dict[str, Launches] = {}
    within = []
    print("     busy    unclassified, by names alone, same class by names")
    with tempfile.TemporaryDirectory() as folder:
        for name, path in traces(options, Path(folder)):
            try:
                trace = read_chrome_trace(path)
            except UsageError as error:
                print(f"not read: {error}")
                continue
            launches[name] = launches_of(trace)
            within.append(print_row(name, trace))
    print(f"{sum(within)} of {len(within)} traces have less than {_BAR:.0%} unclassified")
    labels = label_names(launches)
    rows = list(csv.DictReader(_NAMES.read_text().splitlines())) if _NAMES.exists() else []
    held_out = {row["name"] for row in rows if row["held_out"]}
    print_accuracy("held out", {name: label.class_name for name, label in labels.items() if name in held_out})
    print_accuracy("others", {name: label.class_name for name, label in labels.items() if name not in held_out})
    if options.write:
        write_labels(options.write, labels)
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
