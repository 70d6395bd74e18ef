"""The logs of ``mamf autoprofile`` in their folder, and the SUMMARY.md that follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mamf.kinds.kind import View
from mamf.kinds.registry import kind_of
from mamf.logs.run_log import read_run_log
from mamf.profiling.counters.report import counters_document
from mamf.profiling.log import read_profile_or_none
from mamf.profiling.report import profile_document
from mamf.report.document import Document, Lines
from mamf.report.formats import markdown
from mamf.text import Markup, markdown_text

SUMMARY = "SUMMARY.md"
#: The logs in their order, with what each says.
LOGS = {
    "ceilings.jsonl": "What the card can do",
    "bandwidth.jsonl": "How fast its memory is",
    "kernels.jsonl": "What attention reaches",
    "counters.jsonl": "What bounds the best kernels",
    "step.jsonl": "Where the step of a model goes",
}
_MAX_ROWS = 3


def summary(folder: Path, left_out: Mapping[str, str]) -> str:
    """The reports of all logs as markdown. ``left_out``: why there is no log, by its name."""
    return "\n".join(f"{part.rstrip()}\n" for part in _parts(folder, left_out))


def _parts(folder: Path, left_out: Mapping[str, str]) -> Iterator[str]:
    logs = (folder / name for name in LOGS)
    device = next((name for path in logs if path.exists() and (name := _device_name(path))), "This device")
    yield f"# {markdown_text(device)}: what it can do, and what is reached"
    for name, title in LOGS.items():
        if (folder / name).exists():
            picture = Path(name).with_suffix(".png")
            shown = [Lines([Markup(f"![{title}]({picture})")])] if (folder / picture).exists() else []
            blocks = [*document_of(folder / name).blocks, *shown, Lines([Markup(f"Log: [{name}]({name})")])]
        else:
            blocks = [Lines([f"not measured: {left_out.get(name, 'the run ended before')}"])]
        yield f"## {title}\n\n{markdown(Document(title, blocks))}"


def _device_name(path: Path) -> str:
    if (profiled := read_profile_or_none(path)) is not None:
        return profiled[1].device
    return str(read_run_log(path).header["device"]["name"])


def document_of(path: Path) -> Document:
    """The report of a log of any kind. Raises RunLogError."""
    if (profiled := read_profile_or_none(path)) is not None:
        return profile_document(*profiled, _MAX_ROWS)
    log = read_run_log(path)
    if log.counter_records:
        return counters_document(log)
    return kind_of(log.plan).document(log, View(_MAX_ROWS))
