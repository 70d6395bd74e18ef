"""Implement the command ``mamf overlap``: measure how much a matmul slows down while the device also does other work,
such as a collective with all devices of the machine, or a copy on one device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mamf.cli.session import Session, run_kernel_session
from mamf.cli.terminal import (
    add_device_options,
    add_run_options,
    add_shared_options,
    get_report_stream,
    parse_amount,
    parse_index,
    print_document,
)
from mamf.cli.watching import exit_on_ctrl_c
from mamf.errors import UnavailableError, UsageError, require_known_names
from mamf.measurement import Measurement
from mamf.plans import OVERLAP, SUSTAINED, Plan, RowKey

if TYPE_CHECKING:
    from mamf.engine.runner import RunSetup, Strategy
    from mamf.engine.strategies.studies import OverlapStrategy
    from mamf.logs.run_log import RunLog
    from mamf.node.group import RankPlace
    from mamf.report.document import Document

EXAMPLES = """examples:
  mamf overlap                                     on several devices: matmul with collectives; on one: with copies
  mamf overlap --beside all_reduce --blocks 0 8 16 --shapes 8192x8192x8192+1GiB
  mamf overlap --flop 4e15 --bytes 1.6e10          also predict the shortest step with this work
  mamf overlap --beside to_host copy               on one device
  mamf overlap --resume LOG                        continue after Ctrl-C or kill
"""
_DEFAULT_OTHER_WORK_ON_SEVERAL_DEVICES, _DEFAULT_OTHER_WORK_ON_ONE_DEVICE = (
    ("all_reduce", "all_gather", "reduce_scatter"),
    ("to_host", "to_device", "copy"),
)
_MAX_WAIT_FOR_RANKS_SECONDS = 120.0


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "what to measure", "If options have several values, mamf measures every combination."
    )
    group.add_argument(
        "--beside",
        nargs="+",
        metavar="WORK",
        help="work to run at the same time as matmul: collectives, copies or passes over arrays (default: all_reduce "
        "all_gather reduce_scatter; with one device: to_host to_device copy)",
    )
    add_shared_options(
        group,
        "--shapes",
        help="pairs MxNxK+SIZE: the shape of the matmul and the bytes of the other work (default: 8192x8192x8192 and "
        "16x8192x8192, each with +64MiB and +1GiB; on a CPU 512x512x512+16MiB)",
    )
    group.add_argument(
        "--blocks",
        nargs="+",
        type=parse_index,
        metavar="N",
        help="number of communication blocks of a collective (CTAs in NCCL, channels in RCCL); 0: the "
        "library chooses the number (default: 0)",
    )
    add_shared_options(group, "--dtype")
    add_shared_options(
        group,
        "--time-limit",
        default_text="3s; mamf measures four rows for each pair in --shapes: matmul and other work, each alone and "
        "while both run",
    )
    group.add_argument(
        "--flop",
        type=parse_amount,
        metavar="X",
        help="FLOP of all matmuls of one device in a training step, such as 4e15; mamf predicts the shortest step "
        "(needs --bytes; default: no prediction)",
    )
    group.add_argument(
        "--bytes",
        type=parse_amount,
        metavar="Y",
        help="bytes that each device communicates or copies in that step, counted like SIZE in --shapes, "
        "such as 1.6e10 (needs --flop; default: no prediction)",
    )
    add_device_options(parser)
    add_run_options(parser, "none")
    add_shared_options(parser, "--format", "--top", "--wide")


def run_with_options(options: argparse.Namespace) -> int:
    with exit_on_ctrl_c():
        from mamf.engine.strategies.studies import OverlapStrategy
        from mamf.logs.run_log import read_run_log
        from mamf.node.group import find_rank_place
        from mamf.operations.collective import COLLECTIVE_NAMES
        from mamf.operations.overlap import COUNTED_WORK_NAMES, OTHER_WORK_NAMES, WorkPairKernel
        from mamf.plugins.discovery import count_devices, find_usable_backend_name, open_backend
        from mamf.report.document import add_logged_warnings

    step_sizes = [each for each in (options.flop, options.bytes) if each is not None]
    if len(step_sizes) == 1:
        raise UsageError("--flop and --bytes describe one training step: give both")
    require_known_names(*(("work for --beside", each, OTHER_WORK_NAMES) for each in options.beside or ()))
    rank_place, backend_name = find_rank_place(os.environ), options.backend or find_usable_backend_name()
    device_count = count_devices(backend_name)
    other_work = options.beside or (
        _DEFAULT_OTHER_WORK_ON_SEVERAL_DEVICES if rank_place or device_count > 1 else _DEFAULT_OTHER_WORK_ON_ONE_DEVICE
    )
    collectives = [each for each in other_work if each in COLLECTIVE_NAMES]
    if options.blocks and not collectives and not options.resume:
        raise UsageError("--blocks needs a collective: add a collective with --beside, or leave --blocks out")
    resumed_log = read_run_log(options.resume) if options.resume else None
    is_complete = resumed_log is not None and resumed_log.tier == "complete"
    for_several_devices = [f"the collective {each}" for each in collectives] + ["to_peer"] * ("to_peer" in other_work)
    if for_several_devices and rank_place is None and device_count < 2 and not is_complete:
        raise UsageError(
            f"{for_several_devices[0]} needs several devices, but {backend_name} has {device_count}: use "
            "--beside to_host copy"
        )
    if collectives and rank_place is None and not (is_complete or options.dry_run):
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node={device_count} -m mamf".split()
        return subprocess.call([sys.executable, *launcher, *options.typed_words], stdout=get_report_stream())
    if rank_place is not None:
        # Each process uses the device with its local rank as index. If the launcher shows each process only one device,
        # the modulo gives the index 0.
        options.backend, options.device = backend_name, rank_place.local_rank % max(device_count, 1)
    if rank_place is not None and rank_place.rank:
        strategy = OverlapStrategy(open_backend(backend_name, options.device), WorkPairKernel(), ())
        return 0 if list(measure_pairs_as_rank(strategy, rank_place)) else 1
    options.operation = OVERLAP
    vars(options).update(dict.fromkeys(("kernel", "precision", "regime", "flush")))
    options.set = [
        *(f"other={','.join(other_work)}", f"timed={','.join(COUNTED_WORK_NAMES)}", "alone=yes,no"),
        f"blocks={','.join(map(str, options.blocks or [0]))}",
    ]
    try:
        return run_kernel_session(options, OverlapSession)
    except UnavailableError:
        if resumed_log is None or not is_complete:
            raise
        # The log needs no more measurements, so print its report without its device.
        print_document(options, add_logged_warnings(_make_document(options, resumed_log), resumed_log))
        return 0


def measure_pairs_as_rank(strategy: OverlapStrategy, rank_place: RankPlace | None) -> Iterator[Measurement]:
    """Measure the pairs (a matmul and other work) of ``strategy``, and yield a row per measurement.

    If a launcher such as torchrun started several processes (ranks), all ranks measure the pairs that rank 0 chooses,
    at the same time. ``rank_place``: the rank of this process, or None if no launcher started this process.
    """
    from mamf.node.group import gather_from_all_ranks, join_group

    if rank_place is None:
        yield from strategy.yield_results()
        return
    with join_group(rank_place, strategy.backend, _MAX_WAIT_FOR_RANKS_SECONDS):
        strategy.gather_from_ranks = gather_from_all_ranks
        strategy.pairs, strategy.row_seconds, strategy.budget_seconds = gather_from_all_ranks(
            (strategy.pairs, strategy.row_seconds, strategy.budget_seconds)
        )[0]
        yield from strategy.yield_results()


@dataclass
class _RankStrategy:
    """The strategy of the process that writes the log of ``mamf overlap``. If a launcher started several processes,
    this is the process with rank 0.

    - ``strategy``: plans and measures the rows.
    - ``rank_place``: the rank of this process, or None if no launcher started it.
    - ``logged_keys``: the keys of the rows that the resumed log already has. If one of these rows is measured again,
      the new row is dropped.
    """

    strategy: OverlapStrategy
    rank_place: RankPlace | None
    logged_keys: Collection[RowKey]

    @property
    def skipped_step_count(self) -> int:
        return self.strategy.skipped_step_count

    def yield_results(self) -> Iterator[Measurement]:
        return (row for row in measure_pairs_as_rank(self.strategy, self.rank_place) if row.key not in self.logged_keys)


class OverlapSession(Session):
    kind = OVERLAP

    def make_new_plan(self) -> Plan:
        return replace(super().make_new_plan(), kind=OVERLAP, regimes=(SUSTAINED,), options=None)

    def make_strategy(self, setup: RunSetup) -> Strategy:
        from mamf.node.group import find_rank_place

        strategy: Any = super().make_strategy(setup)
        return _RankStrategy(strategy, find_rank_place(os.environ), [row.key for row in setup.row_by_key.values()])

    def make_document(self, log: RunLog) -> Document:
        return _make_document(self.options, log)


def _make_document(options: argparse.Namespace, log: RunLog) -> Document:
    from mamf.report.overlap import make_overlap_document

    return make_overlap_document(
        log.measurements, log.header, log.summary, options.top, options.flop and (options.flop, options.bytes)
    )
