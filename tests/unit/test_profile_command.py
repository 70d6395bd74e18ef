"""``mamf profile``: a script runs as without mamf, and its steps are told."""

import json
import subprocess
import sys
from argparse import Namespace

import pytest

from mamf.cli import main
from mamf.cli.commands import profile
from mamf.cli.commands.profile import known_here
from mamf.contribution import known_ceilings
from mamf.errors import UnavailableError
from mamf.measurement import IDLE
from mamf.operations.tracing.classes import UNCLASSIFIED
from mamf.operations.tracing.shares import length, union
from mamf.profiling.log import read_profile_or_none
from mamf.rate import Rate

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
#: Little enough for tests of the running alone.
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
    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def profiled(capsys, *arguments):
    """What a run as json tells."""
    assert main([*SHORTLY, "--format", "json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_step_of_a_transformer_is_told_by_class(script, tmp_path, capsys):
    trace, log = tmp_path / "trace.json", tmp_path / "step.jsonl"
    arguments = ["--steps", "2", "--warmup", "1", "--trace", str(trace), "--output", str(log), "--format", "json"]
    assert main(["profile", *arguments, script(TRAINING)]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["class"]: row for row in found["classes"]}
    assert {"attention", "matmul", "normalization", "elementwise", "embedding", "optimizer", IDLE} <= set(rows)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert rows.get(UNCLASSIFIED, {"share": 0})["share"] < 0.02
    assert found["steps"] == 2
    assert found["unprofiled_step_seconds"] > 0
    # Per step and layer: three projections of each kind in forward, twice that in backward, and the logits.
    tokens, width, hidden, words = 4 * 32, 64, 128, 50
    assert rows["matmul"]["flop"] == 2 * 3 * 2 * tokens * (4 * width * width + 2 * width * hidden + width * words)
    # Two products in forward, four in backward: with dropout torch has no fused kernel here.
    assert rows["attention"]["flop"] == 2 * 6 * 2 * 4 * 32 * 32 * width
    products = seconds_of_products(trace) / found["whole_seconds"]
    assert rows["matmul"]["share"] == pytest.approx(products, abs=0.005)

    for form in ("table", "csv", "json", "markdown"):
        assert main(["show", str(log), "--format", form]) == 0
        assert "matmul" in capsys.readouterr().out
    assert main(["results", "check", str(log)]) == 1
    told = capsys.readouterr().out
    assert "results/ does not collect it" in told
    assert "private" not in told
    assert main(["profile", "--from", str(trace), "--format", "json"]) == 0
    read = {row["class"]: row for row in json.loads(capsys.readouterr().out)["classes"]}
    assert all(read[name]["visible_seconds"] == row["visible_seconds"] for name, row in rows.items() if name != IDLE)
    gaps = found["seconds"] - found["busy_seconds"]
    assert read[IDLE]["visible_seconds"] == pytest.approx(gaps), "a trace has no time without the profiler"


def seconds_of_products(trace):
    """Straight from the raw trace: products, whole, without what in them is of another class."""
    events = json.loads(trace.read_text())["traceEvents"]
    marks = sorted(each["ts"] for each in events if each.get("name") == "mamf: step")

    def times(*names):
        for each in events:
            if each["name"] in names and marks[0] < each["ts"] < marks[-1]:
                yield each["ts"] * 1e-6, (each["ts"] + each["dur"]) * 1e-6

    products = times("aten::mm", "aten::addmm", "aten::linear", "aten::matmul")
    others = [*times("aten::scaled_dot_product_attention", "aten::copy_", "aten::clone", "aten::add_")]
    return length(union([*products, *others])) - length(union(others))


def test_a_script_has_its_own_arguments_as_they_are_typed(script, tmp_path):
    said = tmp_path / "said.json"
    text = f"import json, sys\njson.dump([*sys.argv, __name__, sys.path[0]], open({str(said)!r}, 'w'))\n{TINY}"
    arguments = ["--learning_rate", "3", "--steps", "9", "--", "find", "--help"]
    path = script(text)
    assert main([*SHORTLY, path, *arguments]) == 0
    assert json.loads(said.read_text()) == [path, *arguments, "__main__", str(tmp_path)]


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise SystemExit", 0, ""),
    ],
)
def test_the_exit_code_is_the_scripts(script, capsys, end, code, told):
    assert main([*SHORTLY, script(f"{TINY}\n{end}")]) == code
    output = capsys.readouterr()
    assert "1 step of" in output.out
    assert told in output.err


def test_a_scripts_error_is_its_own_traceback(script, capsys):
    assert main([*SHORTLY, script(f"{TINY}\n1 / 0")]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("Traceback (most recent call last):\n  File ")
    assert "runpy" not in output.err
    assert output.err.endswith("ZeroDivisionError: division by zero\n")
    assert "1 step of" in output.out


def test_a_step_ends_where_a_function_returns(script, capsys):
    script("import torch\ndef generate():\n    return torch.ones(2, 2) @ torch.ones(2, 2)\n", "served.py")
    serving = script("from served import generate\nfor _ in range(3):\n    generate()\n", "serve.py")
    found = profiled(capsys, "--calls", "served:generate", serving)
    assert [row["calls"] for row in found["classes"] if row["class"] == "matmul"] == [1]


def test_a_function_of_the_script_itself_is_said_to_be_another(script, capsys):
    own = script("def generate():\n    pass\nif __name__ == '__main__':\n    generate()\n", "serve.py")
    assert main(["profile", "--calls", "serve:generate", own]) == 1
    told = "nothing was profiled: serve:generate was not called (what the script itself defines is another)"
    assert told in capsys.readouterr().err


def test_a_step_ends_where_the_script_says_so(script, capsys):
    text = "import torch\nfrom mamf import profiling\nfor _ in range(3):\n    torch.ones(2) + 1\n    profiling.step()\n"
    assert profiled(capsys, script(text))["steps"] == 1


def test_of_several_optimizers_the_first_ends_the_step(script, capsys):
    text = TINY.replace("optimizer.step()", "optimizer.step()\n    other.step()")
    found = profiled(capsys, script(text.replace("for _", "other = torch.optim.SGD([weight])\nfor _")))
    assert [row["calls"] for row in found["classes"] if row["class"] == "matmul"] == [3]


def test_a_script_that_ends_early_leaves_no_log(script, tmp_path, capsys):
    log = tmp_path / "step.jsonl"
    assert main(["profile", "--output", str(log), script(TINY)]) == 1
    assert "the script took 3 of 11 steps: lower --warmup or --steps" in capsys.readouterr().err
    assert not log.exists()
    assert main(["profile", script("pass")]) == 1
    assert "name a function, as --calls torch:Tensor.backward, or call mamf.profiling.step()" in capsys.readouterr().err


def test_steps_before_the_end_are_kept(script, capsys):
    assert main(["profile", "--warmup", "1", "--steps", "2", script(TINY.replace("range(3)", "range(4)"))]) == 0
    assert ": 1 step of" in capsys.readouterr().out


def test_another_rank_runs_the_script_alone(script, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main([*SHORTLY, script("raise SystemExit(3)")]) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing to profile: name a SCRIPT, or a trace by --from"),
        (["nowhere.py"], "cannot run nowhere.py: there is no such file"),
        (["step.jsonl"], "step.jsonl is not a script: read it with 'mamf show step.jsonl'"),
        (["trace.json.gz"], "trace.json.gz is not a script: read it with 'mamf profile --from trace.json.gz'"),
        (["--stepz", "3", "train.py"], "unknown option '--stepz' (did you mean --steps?)"),
        (["--calls", "json:nothing", "train.py"], "--calls json:nothing: module 'json' has no attribute 'nothing'"),
        (["--calls", "json", "train.py"], "--calls json: write module:function"),
        (["--trace", "train.py", "train.py"], "train.py exists and is not overwritten"),
        (["--trace", "no/trace.json", "train.py"], "there is no such folder"),
        (["--output", "train.py", "train.py"], "train.py exists and is not overwritten: name another --output"),
        (["--from", "nowhere.json"], "cannot read nowhere.json: No such file"),
        (["--from", "trace.json", "train.py"], "leave a SCRIPT out"),
    ],
)
def test_bad_input_is_told_in_a_line(script, tmp_path, monkeypatch, capsys, arguments, told):
    script("")
    monkeypatch.chdir(tmp_path)
    try:
        assert main(["profile", *arguments]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert told in capsys.readouterr().err


def test_a_forked_child_has_its_own_exit_code_and_leaves_the_files_of_its_parent(script, tmp_path):
    child = TINY.replace("import torch", "import os, sys, torch\nchild = os.fork()")
    text = f"{child}\nif not child: sys.exit(3)\nprint('child:', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    command = [sys.executable, "-m", "mamf", *SHORTLY, "--output", "step.jsonl", script(text)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "child: 3\n" in ended.stdout
    assert ended.stdout.count("1 step of") == 1
    assert read_profile_or_none(tmp_path / "step.jsonl") is not None


def test_a_ceiling_is_of_the_sustained_regime(script, library_logs, capsys):
    assert main(["profile", "--ceiling", str(library_logs / "find.jsonl"), script(TINY)]) == 2
    assert "holds no sustained ceiling (it holds: burst)" in capsys.readouterr().err


@pytest.mark.parametrize(("source", "is_one"), [("measured", True), ("contributed", True), ("datasheet", False)])
def test_without_a_log_the_ceiling_is_what_is_known_of_the_device(monkeypatch, source, is_one):
    """A datasheet's promise is no ceiling."""
    known = Rate(rate=2.0, source=source, description="from somewhere", dtype="float32", device="x")
    monkeypatch.setattr(known_ceilings, "peak", lambda device, dtype, regime: known)
    assert known_here.__wrapped__(None, "float32") == (known if is_one else None)


def test_the_device_whose_ceilings_are_known_can_be_named():
    named = [(None, None), (None, 1), ("cuda", None), ("cuda", 3)]
    found = [profile._device(Namespace(backend=backend, device=device)) for backend, device in named]
    assert found == [None, "auto:1", "cuda:0", "cuda:3"]
    assert profile._device(Namespace(backend=None, device=None), is_of_device=False) == "cpu"


def test_an_unknown_device_has_no_share(monkeypatch):
    def unknown(device, dtype, regime):
        raise UnavailableError("nothing is known of it")

    monkeypatch.setattr(known_ceilings, "peak", unknown)
    assert known_here.__wrapped__(None, "float32") is None


def test_a_folder_of_traces_is_reported_by_rank(tmp_path, capsys):
    for rank, microseconds in ((0, 1000), (1, 1300)):
        there = {"ph": "X", "pid": 0, "tid": 7, "ts": 0, "dur": microseconds, "args": {"device": 0, "stream": 7}}
        kernel = {**there, "cat": "kernel", "name": "Cijk_Ailk"}
        step = {**there, "cat": "user_annotation", "name": "ProfilerStep#1", "tid": 1}
        (tmp_path / f"rank{rank}.json").write_text(
            json.dumps({"traceEvents": [kernel, step], "distributedInfo": {"rank": rank}})
        )
    assert main(["profile", "--from", str(tmp_path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert main(["profile", "--from", str(tmp_path)]) == 0
    assert "stragglers: rank 1" in capsys.readouterr().out
    assert main(["profile", "--from", str(tmp_path), "--output", "x.jsonl"]) == 2
    assert "leave --output out" in capsys.readouterr().err
