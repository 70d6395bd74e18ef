"""``mamf profile`` of scripts that start torch.profiler themselves, end early, or are modules."""

import json
from argparse import Namespace

import pytest
import torch
from test_profile_command import SHORTLY, TINY, script

from mamf.cli import main
from mamf.cli.commands import profile
from mamf.profiling.running import Program, StepProfiler

__all__ = ["script"]

#: A script whose own profiler sees steps 0 to 2 of six; what it tells is that mamf left it alone.
OWN = """
import torch
from torch.profiler import ProfilerActivity, profile
weight = torch.nn.Parameter(torch.zeros(2, 2))
optimizer = torch.optim.SGD([weight])
def steps(count):
    for _ in range(count):
        (weight @ weight).sum().backward()
        optimizer.step()
{before}
with profile(activities=[ProfilerActivity.CPU]) as own:
    steps(3)
names = [event.name for event in own.events()]
print("own:", names.count("aten::matmul"), [name for name in names if "mamf" in name])
{after}
"""


def own(before="", after=""):
    return OWN.format(before=before, after=after)


def test_steps_before_it_are_taken_without_a_word(script, capsys):
    assert main([*SHORTLY, script(own(before="steps(3)"))]) == 0
    output = capsys.readouterr()
    assert "own: 3 []\n" in output.out
    assert ": 1 step of" in output.out
    assert output.err == ""


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("before", ["", "steps(2)"], ids=["whole", "in-the-middle"])
def test_a_script_that_profiles_itself_is_left_alone(script, capsys, before, is_old):
    text = own(before=before, after="steps(5)")
    if is_old:
        text = text.replace("own.events()", "own.function_events")
        text = text.replace("with profile(activities=[ProfilerActivity.CPU])", "with torch.autograd.profiler.profile()")
    assert main([*SHORTLY, script(text)]) == 1
    output = capsys.readouterr()
    assert output.out == "own: 3 []\n"
    assert "the script starts torch.profiler itself: read its trace with 'mamf profile --from'" in output.err


def test_torch_is_as_before_afterwards(script):
    usual = {name: getattr(torch.autograd.profiler.profile, name) for name in ("_prepare_trace", "__exit__")}
    assert main([*SHORTLY, script(own(after="raise SystemExit(3)"))]) == 3
    assert {name: getattr(torch.autograd.profiler.profile, name) for name in usual} == usual


AFTERWARDS = f"""{TINY}
import json, pathlib
log = pathlib.Path("step.jsonl").read_text().splitlines()
print("records:", json.loads(log[-1])["record"], pathlib.Path("trace.json").exists())
"""


def test_log_trace_and_report_are_there_before_the_script_goes_on(script, tmp_path, monkeypatch, capsys):
    path = script(AFTERWARDS)
    monkeypatch.chdir(tmp_path)
    assert main([*SHORTLY, "--output", "step.jsonl", "--trace", "trace.json", path]) == 0
    report, last = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert last == "records: summary True"
    assert "most of a step:" in report
    assert "Profile" not in last


@pytest.mark.parametrize("end", ["", "except SystemExit: steps(4)", "finally: 1 / 0", "except BaseException: exit(3)"])
def test_stop_ends_the_script_with_code_0(script, capsys, end):
    text = TINY.replace("for _ in range(3):", "def steps(count):\n  for _ in range(count):")
    body = f"try: steps(3)\n{end}" if end else "steps(3)"
    assert main([*SHORTLY, "--stop", script(f"{text}\n{body}\nprint('went on')")]) == 0
    output = capsys.readouterr().out
    assert ": 1 step of" in output
    assert "went on" not in output


def test_another_rank_stops_with_the_first(script, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main([*SHORTLY, "--stop", script(f"{TINY}\nprint('went on')")]) == 0
    assert capsys.readouterr().out == ""


def test_a_module_runs_as_python_m_runs_it(tmp_path, monkeypatch, capsys):
    package = tmp_path / "held" / "within"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    told = "import json, sys\nprint(json.dumps([__name__, __package__, sys.argv]))"
    (package / "train.py").write_text(f"{told}\n{TINY}")
    monkeypatch.chdir(tmp_path)
    assert main([*SHORTLY, "-m", "held.within.train", "--steps", "9"]) == 0
    first, report = capsys.readouterr().out.split("\n", 1)
    assert json.loads(first) == ["__main__", "held.within", [str(package / "train.py"), "--steps", "9"]]
    assert report.lstrip().startswith("held.within.train on the CPU: 1 step of")
    assert main([*SHORTLY, "-m", "nowhere.train"]) == 2
    assert capsys.readouterr().err == "mamf: cannot run nowhere.train: there is no such module\n"


def test_an_error_in_a_module_is_its_own_traceback(tmp_path, monkeypatch, capsys):
    (tmp_path / "failing.py").write_text(f"{TINY}\n1 / 0")
    monkeypatch.chdir(tmp_path)
    program = Program("failing", is_module=True)
    with program.in_place():
        assert program.run() == 1
    told = capsys.readouterr().err
    assert told.startswith('Traceback (most recent call last):\n  File "')
    assert "runpy" not in told


def test_errors_between_steps_are_kept_and_end_no_script():
    profiler = StepProfiler(1, 1)
    profiler._profile_next = lambda: (_ for _ in ()).throw(RuntimeError("another profiler\nis at work"))
    profiler.step_ended()
    assert profiler.why_nothing(None) == "RuntimeError: another profiler"


def test_files_of_ranks_have_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    options = Namespace(ranks="all", output=tmp_path / "ranks", trace=tmp_path / "t.json.gz", memory=None)
    placed = [profile._place(options, name) for name in ("output", "trace", "memory")]
    assert placed == [tmp_path / "ranks" / "rank-3.jsonl", None, None], "the trace is the first rank's"
    assert main(["profile", "--ranks", "all", __file__]) == 2
