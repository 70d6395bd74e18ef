"""Test which options a resumed run accepts: only those that its log was measured with, in any spelling.

The rules are the same for all commands that measure.
"""

import contextlib
import dataclasses
import json

import pytest
from refusals import assert_refused
from test_attention import KERNELS, SlowAttention

from mamf.cli import main
from mamf.logs.run_log import read_run_log
from mamf.testing import Physics, SimulatedBackend

BACKEND = ["--backend", "mamf.testing:SimulatedBackend"]
MATMUL = ["--kernel", "mamf.testing:SimulatedMatmul"]
ATTENTION = ["--kernel", *KERNELS]
LENGTHS = ["--seq-lens", "512", "1024", "--batch", "2", "--heads", "8", "--kv-heads", "4", "--head-dims", "64"]
#: For each command, the options with which its log is measured.
MADE = {
    "sweep": [
        *("--m", "256", "512", "--n", "256", "--k", "256", "--reference", "128x128x128", "--time-limit", "1s"),
        *("--regime", "burst", "sustained", *MATMUL),
    ],
    "find": ["--budget", "1.2s", *MATMUL],
    "attention": [*LENGTHS, "--causal", "both", "--direction", "fwd", "bwd", "--no-ceiling", *ATTENTION],
}
#: For each command, changes of these options that keep the plan the same. A change maps an option to its new values; an
#: empty text removes the option.
SAME = {
    "sweep": [
        {},
        {"--m": "512 256"},
        {"--m": "", "--m-range": "0 768 256"},
        {"--m": "", "--n": "", "--k": "", "--shapes": "512x256x256 256x256x256"},
        {"--dtype": "bf16", "--layout": "nt", "--seed": "0", "--order": "shuffled", "--reference-every": "100"},
        {"--regime": "sustained burst", "--precision": "0.3%", "--num-iterations": "100", "--data": "normal"},
    ],
    "find": [{}, {"--dtype": "bfloat16 bf16", "--regime": "sustained burst"}],
    "attention": [{}, {"--seq-lens": "1024 512", "--direction": "bwd fwd", "--sparsity": "0", "--query-lens": ""}],
}
#: The part of OTHER that sweeps and searches of matmuls have in common.
PRODUCT = {
    "--dtype": ("float16", "dtype float16", "bfloat16"),
    "--out-dtype": ("float32", "out-dtype float32", "bfloat16"),
    "--layout": ("nn", "layout nn", "nt"),
    "--data": ("zeros", "data zeros", "normal"),
    "--seed": ("1", "seed 1", "0"),
    "--regime": ("burst", "regime burst", "burst sustained"),
    "--precision": ("1%", "precision 0.01", "0.003"),
    "--backend": ("cpu", "backend cpu", "simulated"),
    "--device": ("1", "device 1", "0"),
}
#: For each command and option: a value that changes the plan, and two parts of the message that refuses it: the option
#: with the requested value, and the value in the log.
OTHER = {
    "sweep": {
        **PRODUCT,
        "--m": ("256", "shapes 256x256x256", "256x256x256 512x256x256"),
        "--n": ("512", "shapes 256x512x256 512x512x256", "256x256x256 512x256x256"),
        "--k": ("512", "shapes 256x256x512 512x256x512", "256x256x256 512x256x256"),
        "--order": ("given", "order given", "shuffled"),
        "--reference": ("256x256x256", "reference 256x256x256", "128x128x128"),
        "--clock": ("none", "clock none", "best"),
        "--reference-every": ("10", "reference-every 10", "100"),
        "--time-limit": ("2s", "time-limit 2", "1"),
        "--num-warmup-iterations": ("1", "num-warmup-iterations 1", "50"),
        "--num-iterations": ("1", "num-iterations 1", "100"),
    },
    "find": PRODUCT,
    "attention": {
        "--seq-lens": ("512", "shapes b2h8kv4q512k512d64 b2h8kv4q512k512d64c", "b2h8kv4q512k512d64"),
        "--direction": ("bwd", "direction bwd", "bwd fwd"),
        "--backward-count": ("model", "backward-count model", "hardware"),
        "--sparsity": ("0 0.5", "sparsity 0 0.5", "0"),
        "--time-limit": ("2s", "time-limit 2", "the default"),
    },
}


def changed(options, changes):
    """Return the command line with other values for some options. ``changes``: an empty text removes the option."""
    groups = {}
    for word in options:
        if word.startswith("--"):
            groups[(name := word)] = []
        else:
            groups[name].append(word)
    groups |= {option: values.split() for option, values in changes.items()}
    kept = {option: values for option, values in groups.items() if values or option not in changes}
    return [word for option, values in kept.items() for word in (option, *values)]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return the log of each command as bytes, by the name of the command."""
    folder = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedBackend, "physics", Physics(host_launch_seconds=1e-3))  # few launches per second
        for command, options in MADE.items():
            assert main([command, *BACKEND, *options, "--output", str(folder / command)]) == 0
    return {command: (folder / command).read_bytes() for command in MADE}


@pytest.fixture
def resume(run, logs, tmp_path, monkeypatch):
    """Return a function that resumes a log with ``--dry-run``, which measures nothing, and checks that no log changes.

    ``log``: the command that measured the log, if it is not the command that resumes it.
    """
    monkeypatch.setattr(SimulatedBackend, "count_devices", classmethod(lambda cls: 2))
    for command, log in logs.items():
        (tmp_path / f"{command}.jsonl").write_bytes(log)

    def resumed(command, *options, log=None):
        found = run(command, *BACKEND, "--resume", f"{log or command}.jsonl", *options, "--dry-run")
        assert {path.stem: path.read_bytes() for path in tmp_path.iterdir()} == logs
        return found

    return resumed


@pytest.mark.parametrize(("command", "changes"), [(command, each) for command, all in SAME.items() for each in all])
def test_the_same_options_are_accepted(resume, command, changes):
    code, out, err = resume(command, *changed(MADE[command], changes))
    assert (code, err) == (0, "")
    assert "Simulated H100" in out


@pytest.mark.parametrize(
    ("command", "option", "other", "asked", "held"),
    [(command, option, *case) for command, cases in OTHER.items() for option, case in cases.items()],
)
def test_a_difference_is_refused_with_both_values(resume, command, option, other, asked, held):
    told = f"mamf: --{asked}", f"contradicts {command}.jsonl, which was measured with {held}"
    assert_refused(resume(command, *changed(MADE[command], {option: other})), *told)


def test_what_a_log_names_by_its_module_is_named_again(resume):
    for command in ("find", "attention"):
        options = changed(MADE[command], {"--kernel": ""})
        assert_refused(resume(command, *options), f"{command}.jsonl uses kernel", "if you trust its code")


@pytest.mark.parametrize("command", ["sweep", "find"])
def test_every_option_that_decides_a_figure_is_checked(command, run):
    """Check that this file covers every option. If you add an option to a command, add it to ``OTHER`` or to a set in
    this test.

    ``free``: options that may change when a run is resumed. ``elsewhere``: options that other tests cover.
    """
    free = {"--budget", "--dry-run", "--output", "--resume", "--notes", "--format", "--top", "--wide", "--baseline"}
    free |= {"--requeue", "--patience", "--help", "--help-all", "--devices", "--isolate", "--no-isolate"}
    elsewhere = {"--fast-accumulation", "--no-fast-accumulation", "--no-causal", "--no-flush", "--quick", "--no-quick"}
    elsewhere |= {
        "--ceiling",
        "--ceiling-kernel",
        "--no-ceiling",
        "--operation",
        "--product",
        "--preset",
        "--kernel",
        "--set",
        "--shapes",
    }
    ranges = {"--m-range", "--n-range", "--k-range"}  # like --m
    _, out, _ = run(command, "--help-all")
    named = {word.strip("[](),;") for line in out.partition("\nusage: ")[2].splitlines() for word in line.split()}
    options = {word for word in named if word.startswith("--") and not word.endswith("'")}
    assert options - free - elsewhere - ranges == OTHER[command].keys() - {"--kernel"}


def test_flags_of_attention_and_find_are_compared_too(resume):
    made = MADE["attention"]
    assert_refused(resume("attention", *made, "--no-flush"), "--no-flush contradicts", "measured with no")
    assert_refused(resume("find", *MADE["find"], "--quick"), "--quick contradicts", "measured with no")
    assert_refused(resume("attention", *changed(made, {"--causal": ""}), "--no-causal"), "contradicts")


def test_an_option_that_was_not_typed_is_not_said_to_contradict(resume, tmp_path, logs):
    made = MADE["find"]
    assert_refused(resume("find", *changed(made, {"--dtype": "float16"}), "--quick"), "mamf: --dtype float16 contra")
    without = changed(MADE["sweep"], {"--regime": ""})
    assert_refused(resume("sweep", *without), "this command contradicts", "measured with --regime burst sustained")


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (None, "does not exist"),
        ("", "is empty"),
        ('{"rec', "is cut off within its header"),
        ('{"record": "header", "schema": 5, "to', "is cut off within its header"),
    ],
)
def test_a_log_is_started_so_that_one_command_line_can_be_queued_again(run, tmp_path, left, reason, is_link):
    """Start again from each kind of file that a job may leave behind if it is killed while it starts."""
    options = ["sweep", *BACKEND, *MATMUL, "--m", "256", "512", "--requeue", "run.jsonl"]
    path = tmp_path / ("target.jsonl" if is_link else "run.jsonl")
    if is_link:
        (tmp_path / "run.jsonl").symlink_to(path)
    if left is not None:
        path.write_text(left)
    assert_refused(run(*options[:-2], "--resume", "run.jsonl"), f"run.jsonl, which {reason}: use --requeue")
    code, _, err = run(*options)
    assert (code, f"{path.name} {reason}: starting a new run" in err) == (0, True)
    before = path.read_bytes()
    code, _, err = run(*options)
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("run.jsonl is complete, so this run measures nothing; ")
    assert path.read_bytes() == before
    assert (tmp_path / "run.jsonl").is_symlink() == is_link


def test_a_file_that_is_no_log_is_never_begun(run, tmp_path):
    (tmp_path / "notes.txt").write_text("buy milk")
    assert run("sweep", *BACKEND, *MATMUL, "--m", "256", "--requeue", "notes.txt")[0] == 2
    assert (tmp_path / "notes.txt").read_text() == "buy milk"


def test_a_missing_log_begins_what_the_command_measures_without_it(run, tmp_path):
    model = ["model", *BACKEND, "--size", "tiny", "--dry-run"]
    assert run(*model, "--requeue", "run.jsonl") == run(*model)
    find = ["find", *BACKEND, *MADE["find"], "--dtype", "bf16"]
    assert run(*find, "--requeue", "find.jsonl")[0] == 0
    assert read_run_log(tmp_path / "find.jsonl").plan.problem.dtype == "bfloat16"


def test_a_missing_log_is_of_one_dtype(run, tmp_path):
    refused = run("find", *BACKEND, *MADE["find"], "--dtype", "bf16", "fp16", "--requeue", "run.jsonl")
    assert_refused(refused, "needs a single --dtype")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("of", MADE)
@pytest.mark.parametrize("command", MADE)
def test_a_log_is_resumed_by_the_command_that_began_it(resume, command, of):
    if command == of:
        return
    run = {
        "sweep": "a sweep of matmul",
        "find": "a search for ceilings of matmul",
        "attention": "a sweep of attention",
    }[of]
    told = f"{of}.jsonl is the log of {run}: resume it with 'mamf {of} --resume {of}.jsonl'"
    assert_refused(resume(command, log=of), told)


class Renumbered(SimulatedBackend):
    """A simulated card that has the same UUID at every index."""

    def __init__(self, index=0):
        super().__init__(index)
        self.info = dataclasses.replace(self.info, uuid_hash="abc")


def test_a_card_that_got_another_number_is_the_same_card(run, monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "count_devices", classmethod(lambda cls: 2))
    options = ["sweep", "--backend", "test_resuming:Renumbered", *MATMUL, "--m", "256"]
    assert run(*options, "--output", "run.jsonl")[0] == 0
    assert run(*options, "--resume", "run.jsonl", "--device", "1")[0] == 0


@pytest.mark.parametrize("command", MADE)
def test_a_log_is_continued_in_its_own_file(resume, command):
    assert_refused(resume(command, "--output", "other.jsonl"), "--resume cannot be combined with --output")


# -- ceilings ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the logs of two ``mamf find`` runs with different seeds as bytes, by file name."""
    folder = tmp_path_factory.mktemp("ceilings")
    for name, seed in (("one", "0"), ("two", "1")):
        options = [*BACKEND, *MATMUL, "--regime", "burst", "--budget", "10s", "--seed", seed]
        assert main(["find", *options, "--output", str(folder / name)]) == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def beside(run, found, tmp_path, monkeypatch):
    """Return a function that resumes a run of attention kernels that was measured with the ceiling ``one``."""
    for name, log in found.items():
        (tmp_path / name).write_bytes(log)
    options = ["attention", *BACKEND, "--ceiling-kernel", *MATMUL[1:]]
    run(*options, *ATTENTION, *LENGTHS, "--ceiling", "one", "--output", "run.jsonl")
    return lambda *given: run(*options, *ATTENTION, "--resume", "run.jsonl", *given)


def test_the_logs_own_ceiling_may_be_given_again(beside):
    assert beside("--ceiling", "one", "--baseline", SlowAttention.name)[0] == 0
    assert beside("--ceiling", "run.jsonl")[0] == 0


def test_another_ceiling_or_none_contradicts_the_log(beside, tmp_path):
    before = (tmp_path / "run.jsonl").read_bytes()
    held = "which was measured with a bfloat16 burst ceiling of"
    assert_refused(beside("--ceiling", "two"), f"--ceiling two contradicts run.jsonl, {held}")
    assert_refused(beside("--no-ceiling"), "--no-ceiling contradicts run.jsonl", "measured with a given ceiling")
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_a_log_without_a_ceiling_goes_on_without_one(run, found, tmp_path):
    (tmp_path / "one").write_bytes(found["one"])
    options = ["attention", *BACKEND, *ATTENTION]
    run(*options, *LENGTHS, "--no-ceiling", "--output", "run.jsonl")
    lines = (tmp_path / "run.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_text("".join(lines[:3]))
    assert_refused(run(*options, "--resume", "run.jsonl", "--ceiling", "one"), "--ceiling one", "with no ceiling")
    code, out, _ = run(*options, "--resume", "run.jsonl", "--format", "json")
    assert code == 0
    assert {row["mamfu"] for row in json.loads(out)["measurements"]} == {None}
    assert "ceiling" not in {json.loads(line)["record"] for line in (tmp_path / "run.jsonl").open()}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["--requeue", "a.jsonl", "--resume", "b.jsonl"], "--requeue cannot be combined with --resume"),
        (["--budget=--"], "argument --budget: expected a value"),
    ],
)
def test_options_that_contradict_or_lack_a_value_are_refused(capsys, command, said):
    with contextlib.suppress(SystemExit):
        assert main(["sweep", *command]) == 2
    assert said in capsys.readouterr().err
