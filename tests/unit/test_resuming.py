"""Test which options a resumed run accepts: only those that its log was measured with, in any spelling.

The rules are the same for all commands that measure.
"""

import contextlib
import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import pytest
from refusals import assert_refused
from test_attention import KERNELS, SlowAttention

from mamf.cli import main
from mamf.logs.run_log import read_run_log
from mamf.testing import Physics, SimulatedBackend

OLD_LOGS = Path(__file__).parents[2] / "results" / "amd-epyc"

BACKEND = ["--backend", "mamf.testing:SimulatedBackend"]
MATMUL = ["--kernel", "mamf.testing:SimulatedMatmul"]
ATTENTION = ["--kernel", *KERNELS]
LENGTHS = ["--seq-lens", "512", "1024", "--batch", "2", "--heads", "8", "--kv-heads", "4", "--head-dims", "64"]
#: For each command, the options with which its log is measured.
LOG_OPTIONS = {
    "sweep": [
        *("--m", "256", "512", "--n", "256", "--k", "256", "--reference", "128x128x128", "--time-limit", "1s"),
        *("--regime", "burst", "sustained", *MATMUL),
    ],
    "find": ["--budget", "1.2s", *MATMUL],
    "attention": [*LENGTHS, "--causal", "both", "--direction", "fwd", "bwd", "--no-ceiling", *ATTENTION],
}
#: For each command, changes of these options that keep the plan the same. A change maps an option to its new values; an
#: empty text removes the option.
SAME_PLAN_CHANGES = {
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
#: The part of CONTRADICTIONS that sweeps and searches of matmuls have in common.
CONTRADICTIONS_OF_MATMUL = {
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
CONTRADICTIONS = {
    "sweep": {
        **CONTRADICTIONS_OF_MATMUL,
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
    "find": CONTRADICTIONS_OF_MATMUL,
    "attention": {
        "--seq-lens": ("512", "shapes b2h8kv4q512k512d64 b2h8kv4q512k512d64c", "b2h8kv4q512k512d64"),
        "--direction": ("bwd", "direction bwd", "bwd fwd"),
        "--backward-count": ("model", "backward-count model", "hardware"),
        "--sparsity": ("0 0.5", "sparsity 0 0.5", "0"),
        "--time-limit": ("2s", "time-limit 2", "the default"),
    },
}


def change_options(options, changes):
    """Return the command line with other values for some options. ``changes``: an empty text removes the option."""
    groups = {}
    for word in options:
        if word.startswith("--"):
            groups[(name := word)] = []
        else:
            groups[name].append(word)
    groups |= {option: values.split() for option, values in changes.items()}
    groups = {option: values for option, values in groups.items() if values or option not in changes}
    return [word for option, values in groups.items() for word in (option, *values)]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return the log of each command as bytes, by the name of the command."""
    folder = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedBackend, "physics", Physics(host_launch_seconds=1e-3))  # few launches per second
        for command, options in LOG_OPTIONS.items():
            assert main([command, *BACKEND, *options, "--output", str(folder / command)]) == 0
    return {command: (folder / command).read_bytes() for command in LOG_OPTIONS}


@pytest.fixture
def resume(run, logs, tmp_path, monkeypatch):
    """Return a function that resumes a log with ``--dry-run``, which measures nothing, and checks that no log changes.

    ``log``: the command that measured the log, if it is not the command that resumes it.
    """
    monkeypatch.setattr(SimulatedBackend, "count_devices", classmethod(lambda cls: 2))
    for command, log in logs.items():
        (tmp_path / f"{command}.jsonl").write_bytes(log)

    def resume_without_measuring(command, *options, log=None):
        result = run(command, *BACKEND, "--resume", f"{log or command}.jsonl", *options, "--dry-run")
        assert {path.stem: path.read_bytes() for path in tmp_path.iterdir()} == logs
        return result

    return resume_without_measuring


@pytest.mark.parametrize(
    ("command", "changes"),
    [(command, changes) for command, changes_of_command in SAME_PLAN_CHANGES.items() for changes in changes_of_command],
)
def test_the_same_options_are_accepted(resume, command, changes):
    code, out, err = resume(command, *change_options(LOG_OPTIONS[command], changes))
    assert (code, err) == (0, "")
    assert "Simulated H100" in out


@pytest.mark.parametrize(
    ("command", "option", "value", "requested", "logged"),
    [(command, option, *case) for command, cases in CONTRADICTIONS.items() for option, case in cases.items()],
)
def test_a_difference_is_refused_with_both_values(resume, command, option, value, requested, logged):
    result = resume(command, *change_options(LOG_OPTIONS[command], {option: value}))
    assert_refused(result, f"mamf: --{requested}", f"contradicts {command}.jsonl, which was measured with {logged}")


def test_a_kernel_that_a_log_names_by_its_module_must_be_given_again(resume):
    for command in ("find", "attention"):
        options = change_options(LOG_OPTIONS[command], {"--kernel": ""})
        assert_refused(resume(command, *options), f"{command}.jsonl uses kernel", "if you trust its code")


@pytest.mark.parametrize("command", ["sweep", "find"])
def test_every_option_that_decides_a_figure_is_checked(command, run):
    """Check that this file covers every option. If you add an option to a command, add it to ``CONTRADICTIONS`` or to a
    set in this test.

    ``changeable``: options that may change when a run is resumed. ``covered_elsewhere``: options that other tests
    cover.
    """
    changeable = {
        "--budget",
        "--dry-run",
        "--output",
        "--resume",
        "--requeue",
        "--notes",
        "--format",
        "--top",
        "--wide",
    }
    changeable |= {"--baseline", "--patience", "--help", "--help-all", "--devices", "--isolate", "--no-isolate"}
    covered_elsewhere = {"--fast-accumulation", "--no-fast-accumulation", "--no-causal", "--no-flush", "--quick"}
    covered_elsewhere |= {"--no-quick", "--ceiling", "--ceiling-kernel", "--no-ceiling", "--operation", "--product"}
    covered_elsewhere |= {"--preset", "--kernel", "--set", "--shapes"}
    ranges = {"--m-range", "--n-range", "--k-range"}  # like --m
    _, out, _ = run(command, "--help-all")
    words = {word.strip("[](),;") for line in out.partition("\nusage: ")[2].splitlines() for word in line.split()}
    options = {word for word in words if word.startswith("--") and not word.endswith("'")}
    assert options - changeable - covered_elsewhere - ranges == CONTRADICTIONS[command].keys() - {"--kernel"}


def test_flags_of_attention_and_find_are_compared_too(resume):
    options = LOG_OPTIONS["attention"]
    assert_refused(resume("attention", *options, "--no-flush"), "--no-flush contradicts", "measured with no")
    assert_refused(resume("find", *LOG_OPTIONS["find"], "--quick"), "--quick contradicts", "measured with no")
    assert_refused(resume("attention", *change_options(options, {"--causal": ""}), "--no-causal"), "contradicts")


def test_an_option_that_was_not_typed_is_not_said_to_contradict_the_log(resume):
    options = change_options(LOG_OPTIONS["find"], {"--dtype": "float16"})
    assert_refused(resume("find", *options, "--quick"), "mamf: --dtype float16 contra")
    options_without_regime = change_options(LOG_OPTIONS["sweep"], {"--regime": ""})
    assert_refused(
        resume("sweep", *options_without_regime), "this command contradicts", "measured with --regime burst sustained"
    )


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        ("", "is empty"),
        ('{"rec', "is cut off within its header"),
        ('{"record": "header", "schema": 5, "to', "is cut off within its header"),
    ],
)
def test_requeue_starts_a_new_run_if_the_log_has_no_header(run, tmp_path, content, reason, is_link):
    """Start again from each kind of file that a job may leave behind if it is killed while it starts."""
    options = ["sweep", *BACKEND, *MATMUL, "--m", "256", "512", "--requeue", "run.jsonl"]
    path = tmp_path / ("target.jsonl" if is_link else "run.jsonl")
    if is_link:
        (tmp_path / "run.jsonl").symlink_to(path)
    if content is not None:
        path.write_text(content)
    assert_refused(run(*options[:-2], "--resume", "run.jsonl"), f"run.jsonl, which {reason}: use --requeue")
    code, _, err = run(*options)
    assert (code, f"{path.name} {reason}: starting a new run" in err) == (0, True)
    before = path.read_bytes()
    code, _, err = run(*options)
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("run.jsonl is complete, so this run measures nothing; ")
    assert path.read_bytes() == before
    assert (tmp_path / "run.jsonl").is_symlink() == is_link


def test_a_file_that_is_not_a_log_is_left_unchanged(run, tmp_path):
    (tmp_path / "notes.txt").write_text("buy milk")
    assert run("sweep", *BACKEND, *MATMUL, "--m", "256", "--requeue", "notes.txt")[0] == 2
    assert (tmp_path / "notes.txt").read_text() == "buy milk"


def test_requeue_with_a_missing_log_measures_the_same_as_without_requeue(run, tmp_path):
    model = ["model", *BACKEND, "--size", "tiny", "--dry-run"]
    assert run(*model, "--requeue", "run.jsonl") == run(*model)
    find = ["find", *BACKEND, *LOG_OPTIONS["find"], "--dtype", "bf16"]
    assert run(*find, "--requeue", "find.jsonl")[0] == 0
    assert read_run_log(tmp_path / "find.jsonl").plan.problem.dtype == "bfloat16"


def test_requeue_with_a_missing_log_needs_a_single_dtype(run, tmp_path):
    result = run("find", *BACKEND, *LOG_OPTIONS["find"], "--dtype", "bf16", "fp16", "--requeue", "run.jsonl")
    assert_refused(result, "needs a single --dtype")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "log"), list(itertools.permutations(LOG_OPTIONS, 2)))
def test_a_log_is_not_resumed_by_another_command(resume, command, log):
    title = {
        "sweep": "a sweep of matmul",
        "find": "a search for ceilings of matmul",
        "attention": "a sweep of attention",
    }[log]
    message = f"{log}.jsonl is the log of {title}: resume it with 'mamf {log} --resume {log}.jsonl'"
    assert_refused(resume(command, log=log), message)


def test_no_command_resumes_the_log_of_an_old_roofline(run, tmp_path):
    log = next(OLD_LOGS.glob("bandwidth-roofline-*.jsonl"))
    copy = shutil.copy(log, tmp_path / "old.jsonl")
    reason = "old.jsonl is the log of a roofline: mamf cannot resume this old log; repeat the run with"
    assert_refused(run("find", "--resume", str(copy)), reason)
    _, shown, _ = run("show", str(copy))
    assert "interrupted: the budget ended; 193 measurements in 140.3 s\n" in shown
    assert "--resume" not in shown


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


@pytest.mark.parametrize("command", LOG_OPTIONS)
def test_resume_cannot_be_combined_with_output(resume, command):
    assert_refused(resume(command, "--output", "other.jsonl"), "--resume cannot be combined with --output")


# -- ceilings ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ceiling_logs(tmp_path_factory):
    """Return the logs of two ``mamf find`` runs with different seeds as bytes, by file name."""
    folder = tmp_path_factory.mktemp("ceilings")
    for name, seed in (("one", "0"), ("two", "1")):
        options = [*BACKEND, *MATMUL, "--regime", "burst", "--budget", "10s", "--seed", seed]
        assert main(["find", *options, "--output", str(folder / name)]) == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def resume_attention(run, ceiling_logs, tmp_path):
    """Return a function that resumes a run of attention kernels that was measured with the ceiling ``one``."""
    for name, log in ceiling_logs.items():
        (tmp_path / name).write_bytes(log)
    options = ["attention", *BACKEND, "--ceiling-kernel", *MATMUL[1:]]
    run(*options, *ATTENTION, *LENGTHS, "--ceiling", "one", "--output", "run.jsonl")
    return lambda *arguments: run(*options, *ATTENTION, "--resume", "run.jsonl", *arguments)


def test_the_logs_own_ceiling_may_be_given_again(resume_attention):
    assert resume_attention("--ceiling", "one", "--baseline", SlowAttention.name)[0] == 0
    assert resume_attention("--ceiling", "run.jsonl")[0] == 0


def test_another_ceiling_or_none_contradicts_the_log(resume_attention, tmp_path):
    before = (tmp_path / "run.jsonl").read_bytes()
    reason = "which was measured with a bfloat16 burst ceiling of"
    assert_refused(resume_attention("--ceiling", "two"), f"--ceiling two contradicts run.jsonl, {reason}")
    assert_refused(
        resume_attention("--no-ceiling"), "--no-ceiling contradicts run.jsonl", "measured with a given ceiling"
    )
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_a_log_without_a_ceiling_is_resumed_without_one(run, ceiling_logs, tmp_path):
    (tmp_path / "one").write_bytes(ceiling_logs["one"])
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
    ("options", "message"),
    [
        (["--requeue", "a.jsonl", "--resume", "b.jsonl"], "--requeue cannot be combined with --resume"),
        (["--budget=--"], "argument --budget: expected a value"),
    ],
)
def test_options_that_contradict_or_lack_a_value_are_refused(capsys, options, message):
    with contextlib.suppress(SystemExit):
        assert main(["sweep", *options]) == 2
    assert message in capsys.readouterr().err
