"""Test ``mamf profile``, which runs a script as Python would and reports the time of its training steps."""

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from mamf.cli import main
from mamf.cli.commands.profile import find_known_sustained_ceiling
from mamf.contribution import known_ceilings
from mamf.measurement import IDLE_LABEL, Rate
from mamf.profiling.classes import UNCLASSIFIED
from mamf.profiling.log import read_profile_or_none
from mamf.profiling.traces import merge_intervals, sum_interval_seconds

TRAINING = """
import sys, torch
torch.set_num_threads(1)
model = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, norm_first=True)
embedding = torch.nn.Embedding(50, 64)
optimizer = torch.optim.AdamW([*model.parameters(), *embedding.parameters()])
tokens = torch.zeros(4, 32, dtype=torch.long)
for _ in range(5):
    optimizer.zero_grad()
    logits = model(embedding(tokens)) @ embedding.weight.t()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
"""
#: A training loop of three tiny steps, for tests that do not depend on what the steps compute.
TINY = """
import torch
weight = torch.nn.Parameter(torch.zeros(2, 2))
optimizer = torch.optim.SGD([weight])
for _ in range(3):
    (weight @ weight).sum().backward()
    optimizer.step()
"""
SHORTLY = ["profile", "--warmup", "1", "--steps", "1"]


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script to the temporary folder and returns its path."""

    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def profiled(capsys, *arguments):
    """Profile one step of a script after one warm-up step, and return the report, parsed from JSON."""
    assert main([*SHORTLY, "--format", "json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_step_of_a_transformer_is_divided_into_classes(script, tmp_path, capsys):
    trace, log = tmp_path / "trace.json", tmp_path / "step.jsonl"
    arguments = ["--steps", "2", "--warmup", "1", "--trace", str(trace), "--output", str(log), "--format", "json"]
    assert main(["profile", *arguments, script(TRAINING)]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["class"]: row for row in report["classes"]}
    assert {"attention", "matmul", "normalization", "elementwise", "embedding", "optimizer"} <= set(rows)
    # The profiler slows operations, so their time may be longer than a step without the profiler. Then the report has
    # no row of idle time.
    assert (IDLE_LABEL in rows) == (sum(rows[name]["share"] for name in rows if name != IDLE_LABEL) < 1 - 1e-9)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert rows.get(UNCLASSIFIED, {"share": 0})["share"] < 0.02
    assert report["steps"] == 2
    assert report["unprofiled_step_seconds"] > 0
    # 2 steps, each with the forward pass and a backward pass of twice its FLOP; 2 FLOP per multiply-add. The weights
    # are the four attention projections, the two matrices of the MLP, and the embedding, which computes the logits.
    tokens, width, hidden, vocabulary = 4 * 32, 64, 128, 50
    assert rows["matmul"]["flop"] == 2 * 3 * 2 * tokens * (4 * width * width + 2 * width * hidden + width * vocabulary)
    # 2 steps, each with two matmuls in the forward pass and four in the backward pass. A fused backward kernel would
    # compute five, but on a CPU torch has no fused kernel with dropout.
    assert rows["attention"]["flop"] == 2 * 6 * 2 * 4 * 32 * 32 * width
    matmul_share = compute_matmul_seconds(trace) / report["whole_seconds"]
    assert rows["matmul"]["share"] == pytest.approx(matmul_share, abs=0.005)

    for form in ("table", "csv", "json", "markdown"):
        assert main(["show", str(log), "--format", form]) == 0
        assert "matmul" in capsys.readouterr().out
    assert main(["results", "check", str(log)]) == 1
    printed = capsys.readouterr().out
    assert "results/ does not collect it" in printed
    assert "private" not in printed
    assert main(["profile", "--from", str(trace), "--format", "json"]) == 0
    rows_from_trace = {row["class"]: row for row in json.loads(capsys.readouterr().out)["classes"]}
    assert all(
        rows_from_trace[name]["visible_seconds"] == row["visible_seconds"]
        for name, row in rows.items()
        if name != IDLE_LABEL
    )
    gap_seconds = report["seconds"] - report["busy_seconds"]
    assert rows_from_trace[IDLE_LABEL]["visible_seconds"] == pytest.approx(gap_seconds), (
        "with a trace only, all gaps must count as idle"
    )


def compute_matmul_seconds(trace):
    """Compute the seconds of matmuls from the raw trace, without the time of operations of other classes that they
    call.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    step_ends = sorted(event["ts"] for event in events if event.get("name") == "mamf: step")

    def yield_intervals(*names):
        for event in events:
            if event["name"] in names and step_ends[0] < event["ts"] < step_ends[-1]:
                yield event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6

    matmuls = list(yield_intervals("aten::mm", "aten::addmm", "aten::linear", "aten::matmul"))
    others = list(yield_intervals("aten::scaled_dot_product_attention", "aten::copy_", "aten::clone", "aten::add_"))
    total_seconds = sum_interval_seconds(merge_intervals(matmuls + others))
    return total_seconds - sum_interval_seconds(merge_intervals(others))


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, "mamf: the script was interrupted\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
@pytest.mark.parametrize("is_module", [False, True])
def test_exit_code_and_traceback_are_the_scripts(script, tmp_path, monkeypatch, capsys, end, code, message, is_module):
    path = script(f"{TINY}\n{end}")
    monkeypatch.chdir(tmp_path)
    assert main([*SHORTLY, *(["-m", "train"] if is_module else [path])]) == code
    output = capsys.readouterr()
    assert "1 step of" in output.out
    assert output.err.endswith(message)
    assert output.err.startswith("Traceback (most recent call last):\n  File ") == (end == "1 / 0")
    assert "runpy" not in output.err


MODEL_SCRIPT = (
    "import torch\nclass Model:\n    def generate(self):\n        return torch.ones(2, 2) @ torch.ones(2, 2)\n"
)
CALLS_OF_MODEL = "for _ in range(3):\n    Model().generate()\n"


@pytest.mark.parametrize(("module", "is_module"), [("served", False), ("__main__", False), ("__main__", True)])
def test_a_step_ends_where_a_function_returns(script, tmp_path, monkeypatch, capsys, module, is_module):
    script(MODEL_SCRIPT, "served.py")
    path = script(
        f"{MODEL_SCRIPT if module == '__main__' else 'from served import Model'}\n{CALLS_OF_MODEL}", "serve.py"
    )
    monkeypatch.chdir(tmp_path)
    program = ["-m", "serve"] if is_module else [path]
    report = profiled(capsys, "--calls", f"{module}:Model.generate", *program)
    assert [row["calls"] for row in report["classes"] if row["class"] == "matmul"] == [1]


def test_a_function_of_the_script_itself_is_in_the_module_main(script, capsys):
    path = script(f"{MODEL_SCRIPT}if __name__ == '__main__':\n    Model().generate()\n", "serve.py")
    assert main(["profile", "--calls", "serve:Model.generate", path]) == 1
    assert "serve:Model.generate was not called: write __main__:FUNCTION for a function" in (capsys.readouterr().err)
    assert main(["profile", "--calls", "__main__:serve", path]) == 2
    assert "--calls __main__:serve: serve.py defines no such function" in capsys.readouterr().err


def test_of_several_optimizers_the_first_ends_the_step(script, capsys):
    text = TINY.replace("optimizer.step()", "optimizer.step()\n    other.step()")
    report = profiled(capsys, script(text.replace("for _", "other = torch.optim.Adam([weight])\nfor _")))
    assert [row["calls"] for row in report["classes"] if row["class"] == "matmul"] == [3]
    assert "several optimizers step: only the first, SGD, ends a step; others are Adam" in report["notes"]


def test_matmuls_of_an_optimizer_do_not_count_as_flop_of_the_model(script, capsys):
    muon = "class Muon(torch.optim.SGD):\n def step(self):\n  super().step()\n  weight.data @ weight.data\n"
    report = profiled(capsys, script(TINY.replace("torch.optim.SGD(", "Muon(").replace("weight =", f"{muon}weight =")))
    assert report["flop"] == 3 * 2 * 2 * 2 * 2


AUTOCAST = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.ones(2, 8)) @ torch.ones(8, 4)
        loss = torch.nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.long))
    loss.backward()
    optimizer.step()
"""


def test_a_table_shows_the_dtypes_under_autocast(script, tmp_path, capsys):
    log = tmp_path / "step.jsonl"
    report = profiled(capsys, "--dtypes", "--output", str(log), script(AUTOCAST))
    rows = {(row["part"], row["dtype"]): row["count"] for row in report["dtypes"]}
    assert rows == {
        ("parameters", "float32"): 4,
        ("gradients", "float32"): 4,
        ("outputs of Linear", "bfloat16"): 1,
        ("outputs of LayerNorm", "bfloat16"): 1,
        ("logits", "bfloat16"): 1,
        ("loss", "float32"): 1,
    }
    assert main(["show", str(log)]) == 0
    assert "outputs of Linear" in capsys.readouterr().out


def test_a_script_that_ends_early_leaves_no_log(script, tmp_path, capsys):
    log = tmp_path / "step.jsonl"
    assert main(["profile", "--output", str(log), script(TINY)]) == 1
    assert "the script took 3 of 11 steps: lower --warmup or --steps" in capsys.readouterr().err
    assert not log.exists()
    assert main(["profile", script("pass")]) == 1
    assert (
        "name the function that is a training step, such as --calls torch:Tensor.backward or "
        "--calls __main__:train" in capsys.readouterr().err
    )


def test_steps_before_the_end_are_kept(script, capsys):
    assert main(["profile", "--warmup", "1", "--steps", "2", script(TINY.replace("range(3)", "range(4)"))]) == 0
    assert ": 1 step of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no SCRIPT and no --from is given: name a script to profile, or a trace with --from"),
        (["nowhere.py"], "cannot run nowhere.py: there is no such file"),
        (["step.jsonl"], "step.jsonl is not a script: read it with 'mamf show step.jsonl'"),
        (["--calls", "json:nothing", "train.py"], "--calls json:nothing: module 'json' has no attribute 'nothing'"),
        (["--trace", "train.py", "train.py"], "train.py already exists"),
        (["--output", "train.py", "train.py"], "train.py already exists: choose another file for --output"),
        (["--from", "trace.json", "train.py"], "--from cannot be combined with a SCRIPT"),
        (["--memory", "no/memory.pickle", "train.py"], "its folder does not exist: create it first"),
    ],
)
def test_bad_input_is_refused_with_a_message(script, tmp_path, monkeypatch, capsys, arguments, message):
    script("")
    monkeypatch.chdir(tmp_path)
    try:
        assert main(["profile", *arguments]) == 2
    except SystemExit as stop:
        assert stop.code == 2
    assert message in capsys.readouterr().err


def test_a_forked_child_has_its_own_exit_code_and_leaves_the_files_of_its_parent(script, tmp_path):
    script_with_fork = TINY.replace("import torch", "import os, sys, torch\nchild = os.fork()")
    waiting = "print('child:', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    text = f"{script_with_fork}\nif not child: sys.exit(3)\n{waiting}"
    command = [sys.executable, "-m", "mamf", *SHORTLY, "--output", "step.jsonl", script(text)]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    messages = [line for line in process.stderr.splitlines() if " WARN host load" not in line]
    assert (process.returncode, messages) == (0, [])
    assert "child: 3\n" in process.stdout
    assert process.stdout.count("1 step of") == 1
    assert read_profile_or_none(tmp_path / "step.jsonl") is not None


def test_a_script_that_removes_all_temporary_files_is_profiled(script, tmp_path, monkeypatch, capsys):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    cleaning = f"import shutil\nshutil.rmtree({str(temporary)!r})\n"
    assert profiled(capsys, script(cleaning + TINY))["steps"] == 1


@pytest.mark.parametrize(
    ("steps", "code", "is_profiled", "error"),
    [(3, 3, True, ""), (2, 1, False, "the script forked a training process, which took fewer than 3 steps")],
)
def test_steps_of_a_forked_child_are_profiled_if_its_parent_takes_none(
    script, tmp_path, steps, code, is_profiled, error
):
    training = TINY.replace("range(3)", f"range({steps})").replace("import torch\n", "").replace("\n", "\n    ")
    text = f"""
import os, sys, torch
child = os.fork()
if not child:{training}
    os._exit(5)
print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.exit({3 if is_profiled else 0})
"""
    command = [sys.executable, "-m", "mamf", *SHORTLY, "--output", "step.jsonl", script(text)]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == code
    assert error in process.stderr
    assert "child: 5\n" in process.stdout
    assert process.stdout.count("1 step of") == is_profiled
    assert (tmp_path / "step.jsonl").exists() is is_profiled


def test_a_log_without_a_sustained_ceiling_is_refused(script, library_logs, capsys):
    assert main(["profile", "--ceiling", str(library_logs / "find.jsonl"), script(TINY)]) == 2
    assert "has no sustained ceiling (its ceilings: burst)" in capsys.readouterr().err


def test_a_ceiling_with_an_unknown_interval_is_refused(script, capsys, tmp_path):
    h200 = next((Path(__file__).parents[2] / "results" / "nvidia-h200").glob("find-bfloat16-burst-sustained-*.jsonl"))
    noisy = tmp_path / "noisy.jsonl"
    noisy.write_text(re.sub(r'"interval_tflops": \[[^,]+, [^]]+', '"interval_tflops": [1.0, 90000.0', h200.read_text()))
    assert main(["profile", "--ceiling", str(noisy), script(TINY)]) == 2
    assert "the sustained ceiling is too noisy to compare rates with it" in capsys.readouterr().err


def test_a_ceiling_of_another_device_gives_no_mamfu(script, capsys):
    h200 = next((Path(__file__).parents[2] / "results" / "nvidia-h200").glob("find-bfloat16-burst-sustained-*.jsonl"))
    assert main([*SHORTLY, "--backend", "cpu", "--ceiling", str(h200), script(TINY)]) == 0
    out, err = capsys.readouterr()
    assert "no MAMFU: the ceiling was measured on NVIDIA H200, not on this" in " ".join(err.split())
    assert "% MAMFU" not in out
    assert "the sustained ceiling of float32 is unknown or too noisy: repeat the command" in " ".join(out.split())


@pytest.mark.parametrize(("source", "is_used"), [("measured", True), ("contributed", True), ("datasheet", False)])
def test_without_a_log_a_measured_rate_of_the_device_is_the_ceiling(script, capsys, monkeypatch, source, is_used):
    """Check that a rate that was measured, on this device or on another of the same model, is the ceiling, but that a
    peak from a datasheet is not.
    """
    rate = Rate(rate=2.0, source=source, description="from somewhere", dtype="float32", regime="sustained", device="x")
    devices = []
    monkeypatch.setattr(known_ceilings, "peak", lambda device, dtype, regime: devices.append(device) or rate)
    find_known_sustained_ceiling.cache_clear()
    ceilings = [{"dtype": "float32", "regime": "sustained", "tflops": 2.0, "source": source, "told": "from somewhere"}]
    assert profiled(capsys, "--backend", "cpu", script(TINY))["ceilings"] == (ceilings if is_used else [])
    assert set(devices) == {"cpu:0"}
    find_known_sustained_ceiling.cache_clear()


# --- scripts that profile themselves, end early or are modules

#: A script that profiles three steps with its own torch.profiler. It prints "script's profile: 3 []" if its profile
#: contains the matmuls of these three steps and no events of mamf. ``before``, ``after``: code that the script runs
#: before and after it profiles, such as more steps.
SELF_PROFILING = """
import torch
from torch.profiler import ProfilerActivity, profile
weight = torch.nn.Parameter(torch.zeros(2, 2))
optimizer = torch.optim.SGD([weight])
def steps(count):
    for _ in range(count):
        (weight @ weight).sum().backward()
        optimizer.step()
{before}
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    steps(3)
names = [event.name for event in profiler.events()]
print("script's profile:", names.count("aten::matmul"), [name for name in names if "mamf" in name])
{after}
"""


def format_self_profiling_script(before="", after=""):
    return SELF_PROFILING.format(before=before, after=after)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("before", ["", "steps(2)"], ids=["whole", "in-the-middle"])
def test_a_script_that_profiles_itself_is_left_alone(script, capsys, before, is_old):
    text = format_self_profiling_script(before=before, after="steps(5)")
    if is_old:
        text = text.replace("profiler.events()", "profiler.function_events")
        text = text.replace("with profile(activities=[ProfilerActivity.CPU])", "with torch.autograd.profiler.profile()")
    assert main([*SHORTLY, script(text)]) == 1
    output = capsys.readouterr()
    assert output.out == "script's profile: 3 []\n"
    assert "the script starts torch.profiler itself: read its trace with 'mamf profile --from'" in output.err


def test_steps_until_its_own_profiler_begins_are_kept(script, tmp_path, capsys):
    log = tmp_path / "step.jsonl"
    arguments = ["profile", "--warmup", "1", "--steps", "2", "--output", str(log)]
    assert main([*arguments, script(format_self_profiling_script(before="steps(4)"))]) == 0
    output = capsys.readouterr().out
    assert ": 1 step of" in output
    assert "1 of 2 steps, because the script started a profiler; mamf's profiler slowed the steps before" in output
    assert "script's profile: 3 []\n" in output
    assert read_profile_or_none(log)[1].steps == 1
    assert (
        main(["profile", "--warmup", "2", "--steps", "2", script(format_self_profiling_script(before="steps(5)"))]) == 0
    )
    assert (
        "1 of 2 steps, because the script started a profiler; with --warmup 1 mamf can profile 2 steps; "
        in capsys.readouterr().out
    )


def test_torch_is_unchanged_after_a_profile(script):
    originals = {name: getattr(torch.autograd.profiler.profile, name) for name in ("_prepare_trace", "__exit__")}
    assert main([*SHORTLY, script(format_self_profiling_script(after="raise SystemExit(3)"))]) == 3
    assert {name: getattr(torch.autograd.profiler.profile, name) for name in originals} == originals


READING_LOG_AFTERWARDS = f"""{TINY}
import json, pathlib
log = list(map(json.loads, pathlib.Path("step.jsonl").read_text().splitlines()))
print("records:", log[-1]["record"], log[0]["command"].endswith("train.py --lr 3"), pathlib.Path("trace.json").exists())
"""


def test_log_trace_and_report_are_written_before_the_script_continues(script, tmp_path, monkeypatch, capsys):
    path = script(READING_LOG_AFTERWARDS)
    monkeypatch.chdir(tmp_path)
    arguments = [*SHORTLY, "--output", "step.jsonl", "--trace", "trace.json", path, "--lr", "3"]
    monkeypatch.setattr(sys, "argv", ["mamf", *arguments])
    assert main(arguments) == 0
    report, last_line = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert last_line == "records: summary True True"
    assert "largest parts of a step:" in report
    assert "Profile" not in last_line


def test_a_title_names_the_steps_in_the_report_and_in_the_log(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SHORTLY, "--title", "a tiny model", "--output", "step.jsonl", script(TINY)]) == 0
    assert "a tiny model on the CPU: 1 step of" in capsys.readouterr().out
    assert main(["show", "step.jsonl"]) == 0
    assert "a tiny model on the CPU: 1 step of" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["", "except SystemExit: steps(4)", "finally: 1 / 0", "except BaseException: exit(3)"])
def test_stop_ends_the_script_with_code_0(script, capsys, end):
    text = TINY.replace("for _ in range(3):", "def steps(count):\n  for _ in range(count):")
    body = f"try: steps(3)\n{end}" if end else "steps(3)"
    assert main([*SHORTLY, "--stop", script(f"{text}\n{body}\nprint('went on')")]) == 0
    output = capsys.readouterr().out
    assert ": 1 step of" in output
    assert "went on" not in output


def test_another_rank_runs_the_script_alone_and_stops_with_the_first(script, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main([*SHORTLY, script("raise SystemExit(3)")]) == 3
    assert main([*SHORTLY, "--stop", script(f"{TINY}\nprint('went on')")]) == 0
    assert capsys.readouterr().out == ""


def test_a_module_runs_as_python_m_runs_it(tmp_path, monkeypatch, capsys):
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    code = "import json, sys\nprint(json.dumps([__name__, __package__, sys.argv]))"
    (package / "train.py").write_text(f"{code}\n{TINY}")
    monkeypatch.chdir(tmp_path)
    assert main([*SHORTLY, "-m", "package.inner.train", "--steps", "9"]) == 0
    first_line, report = capsys.readouterr().out.split("\n", 1)
    assert json.loads(first_line) == ["__main__", "package.inner", [str(package / "train.py"), "--steps", "9"]]
    assert report.lstrip().startswith("package.inner.train on the CPU: 1 step of")
    assert main([*SHORTLY, "-m", "nowhere.train"]) == 2
    assert capsys.readouterr().err == "mamf: cannot run nowhere.train: there is no such module; check its name\n"


def test_an_error_of_the_profiler_does_not_end_the_script(script, monkeypatch, capsys):
    def fail(**options):
        raise RuntimeError("another profiler\nis at work")

    monkeypatch.setattr("mamf.profiling.running.make_torch_profiler", fail)
    assert main([*SHORTLY, script(f"{TINY}\nprint('went on')")]) == 1
    output = capsys.readouterr()
    assert output.out == "went on\n"
    assert "nothing was profiled: RuntimeError: another profiler" in output.err


def test_the_log_of_a_rank_has_the_number_of_the_rank(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    trace = tmp_path / "trace.json"
    arguments = ["--ranks", "all", "--output", str(tmp_path / "ranks"), "--trace", str(trace)]
    assert main([*SHORTLY, *arguments, script(TINY)]) == 0
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == ["rank-3.jsonl"]
    assert (capsys.readouterr().out, trace.exists()) == ("", False)
    assert main(["profile", "--ranks", "all", script(TINY)]) == 2


def test_a_busy_host_is_warned_of_unless_other_ranks_keep_it_busy(script, monkeypatch, capsys):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 90.0)
    path = script(TINY)
    main([*SHORTLY, path])
    report = capsys.readouterr()
    assert "WARN host load: the host's CPU is 90 % busy" in report.err
    assert "WARN host load: the host's CPU is 90 % busy" in report.out
    monkeypatch.setenv("WORLD_SIZE", "2")
    main(["profile", "--steps", "1", path])
    assert "host load" not in capsys.readouterr().err
