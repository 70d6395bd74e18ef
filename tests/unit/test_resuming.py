"""What may be asked of a resumed run: what its log was measured with, again. Alike for every measuring command."""

import dataclasses
import json

import pytest
from test_attention import KERNELS, SlowAttention

from mamf.cli import main
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul

BACKEND = ["--backend", "mamf.testing:SimulatedBackend"]
MATMUL = ["--kernel", "mamf.testing:SimulatedMatmul"]
ATTENTION = ["--kernel", *KERNELS]
LENGTHS = ["--seq-lens", "512", "1024", "--batch", "2", "--heads", "8", "--kv-heads", "4", "--head-dims", "64"]
#: How the log of a command was made.
MADE = {
    "sweep": [
        *("--m", "256", "512", "--n", "256", "--k", "256", "--reference", "128x128x128", "--time-limit", "1s"),
        *("--regime", "burst", "sustained", *MATMUL),
    ],
    "find": ["--budget", "1.2s", *MATMUL],
    "attention": [*LENGTHS, "--causal", "both", "--direction", "fwd", "bwd", "--no-ceiling", *ATTENTION],
}
# What sweep and find have in common: an option, what repeats the log's value, and what contradicts it.
PRODUCT = [
    ("--dtype", "bf16", "float16", "bfloat16"),
    ("--out-dtype", "bfloat16", "float32", "bfloat16"),
    ("--layout", "nt", "nn", "nt"),
    ("--data", "normal", "zeros", "normal"),
    ("--seed", "0", "1", "0"),
    ("--kernel", "mamf.testing:SimulatedMatmul", "torch.mm", "simulated.mm"),
    ("--regime", "sustained burst", "burst", "burst sustained"),
    ("--precision", "0.3%", "1%", "0.003"),
    ("--backend", "mamf.testing:SimulatedBackend", "cpu", "simulated"),
    ("--device", "0", "1", "0"),
]
CASES = {
    "sweep": [
        *PRODUCT,
        ("--m", "512 256", "256", "256 512"),
        ("--m-range", "0 768 256", "0 1024 256", "256 512"),
        ("--n", "256", "512", "256"),
        ("--k", "256", "512", "256"),
        ("--shapes", "512x256x256 256x256x256", "256x256x256", "256x256x256 512x256x256"),
        ("--preset", "", "decode", "256x256x256 512x256x256"),
        ("--order", "shuffled", "given", "shuffled"),
        ("--reference", "128x128x128", "256x256x256", "128x128x128"),
        ("--reference-every", "100", "10", "100"),
        ("--time-limit", "1s", "2s", "1"),
        ("--num-warmup-iterations", "50", "1", "50"),
        ("--num-iterations", "100", "1", "100"),
    ],
    "find": [*PRODUCT, ("--dtype", "bfloat16 bf16", "bfloat16 float16", "bfloat16")],
    "attention": [
        ("--seq-lens", "1024 512", "512", "512 1024"),
        ("--query-lens", "512 1024", "1", "512 1024"),
        ("--head-dims", "64", "128", "64"),
        ("--heads", "8", "16", "8"),
        ("--kv-heads", "4", "8", "4"),
        ("--batch", "2", "1", "2"),
        ("--causal", "both", "no", "no yes"),
        ("--window", "", "64", "the default"),
        ("--preset", "", "bert-base", "b2h8kv4q512k512d64"),
        ("--dtype", "bf16", "float16", "bfloat16"),
        ("--direction", "bwd fwd", "bwd", "bwd fwd"),
        ("--backward-count", "hardware", "model", "hardware"),
        ("--sparsity", "0", "0 0.5", "0"),
        ("--seed", "0", "1", "0"),
        ("--kernel", " ".join(reversed(KERNELS)), KERNELS[0], "slow-attention simulated-attention"),
        ("--regime", "burst", "burst sustained", "burst"),
        ("--precision", "0.3%", "1%", "0.003"),
        ("--time-limit", "", "2s", "the default"),
        ("--backend", "mamf.testing:SimulatedBackend", "cpu", "simulated"),
        ("--device", "0", "1", "0"),
    ],
}
EVERY = [(command, *case) for command, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A log of each command, as bytes."""
    folder = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedBackend, "physics", Physics(launch_seconds=1e-3))  # a soak of few launches
        for command, options in MADE.items():
            assert main([command, *BACKEND, *options, "--output", str(folder / command)]) == 0
    return {command: (folder / command).read_bytes() for command in MADE}


@pytest.fixture
def resume(run, logs, tmp_path, monkeypatch):
    """Resume the log of a command, or another command's; without a device's work."""
    monkeypatch.setattr(SimulatedBackend, "device_count", classmethod(lambda cls: 2))
    for command, log in logs.items():
        (tmp_path / f"{command}.jsonl").write_bytes(log)

    def resumed(command, *options, log=None, kernel=True):
        # A log names kernels, and what it names is not imported unless the command names it too.
        named = [] if "--kernel" in options or not kernel else ATTENTION if command == "attention" else MATMUL
        found = run(command, *BACKEND, *named, "--resume", f"{log or command}.jsonl", *options, "--dry-run")
        assert {path.stem: path.read_bytes() for path in tmp_path.iterdir()} == logs
        return found

    return resumed


def assert_refused(found, *told):
    code, out, err = found
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    for text in told:
        assert text in err


@pytest.mark.parametrize(("command", "option", "repeated"), [case[:3] for case in EVERY if case[2]])
def test_what_repeats_the_log_is_accepted(resume, command, option, repeated):
    code, out, err = resume(command, option, *repeated.split())
    assert (code, err) == (0, "")
    assert "Simulated H100" in out


@pytest.mark.parametrize(("command", "option", "repeated", "other", "held"), EVERY)
def test_what_contradicts_the_log_is_refused_and_says_what_to_do(resume, command, option, repeated, other, held):
    if option == "--kernel" and command != "sweep":  # whose name is of a class that nobody registered
        return assert_refused(
            resume(command, option, *other.split()), f"{command}.jsonl names kernel", "if you trust it"
        )
    asked = {"1%": "0.01", "2s": "2"}.get(other, other)
    told = f"mamf: {option} {asked} contradicts {command}.jsonl, which was measured with {held}"
    return assert_refused(resume(command, option, *other.split()), told, f": leave {option} out, or start a new log")


@pytest.mark.parametrize("command", MADE)
def test_every_option_that_decides_a_figure_is_checked(command, run):
    """Whoever adds an option adds it here: a contradiction of it, or a reason why it is free."""
    free = {
        "--budget",
        "--dry-run",
        "--output",
        "--resume",
        "--notes",
        "--format",
        "--top",
        "--wide",
        "--baseline",
        "--patience",
        "--help",
    }
    elsewhere = {
        "--fast-accumulation",
        "--no-fast-accumulation",
        "--no-causal",
        "--no-flush",
        "--quick",
        "--no-quick",
        "--ceiling",
        "--operation",
        "--product",
        "--devices",
    }
    ranges = {"--n-range", "--k-range"}  # as --m-range
    _, out, _ = run(command, "--help")
    named = {word.strip("[],") for line in out.split("examples:")[0].splitlines() for word in line.split()}
    options = {word for word in named if word.startswith("--") and not word.endswith("'")}
    assert options - free - elsewhere - ranges - {"--no-ceiling"} == {case[0] for case in CASES[command]}


@pytest.mark.parametrize("command", ["sweep", "find"])
def test_flags_are_repeated_or_contradict_too(resume, command):
    assert resume(command, "--no-fast-accumulation")[0] == 0
    assert_refused(resume(command, "--fast-accumulation"), f"--fast-accumulation contradicts {command}.jsonl", "no")


def test_flags_of_attention_are_repeated_or_contradict_too(resume):
    assert resume("attention", "--no-ceiling")[0] == 0
    assert_refused(resume("attention", "--no-flush"), "--no-flush contradicts", "measured with flushed caches")
    assert_refused(resume("find", "--quick"), "--quick contradicts", "measured with no")
    assert_refused(resume("attention", "--no-causal"), "--causal no contradicts")


def test_sizes_that_are_the_logs_one_by_one_but_not_together_are_refused(run, tmp_path):
    options = [*BACKEND, *MATMUL, "--shapes", "256x256x64", "512x512x64", "--output", "run.jsonl"]
    assert run("sweep", *options)[0] == 0
    resume = ["sweep", *BACKEND, *MATMUL, "--resume", "run.jsonl"]
    assert run(*resume, "--m", "256", "512", "--k", "64")[0] == 0
    assert_refused(run(*resume, "--m", "256", "512", "--n", "256", "512"), "--m --n: run.jsonl holds other comb")


def test_a_preset_is_repeated(run):
    options = [*BACKEND, "--no-ceiling"]
    assert run("attention", *options, *ATTENTION, "--preset", "bert-base", "--output", "run.jsonl")[0] == 0
    resume = ["attention", *options, *ATTENTION, "--resume", "run.jsonl"]
    assert run(*resume, "--preset", "bert-base")[0] == 0
    assert_refused(run(*resume, "--preset", "bert-base", "--heads", "8"), "--heads 8 contradicts", "with 12")


@pytest.mark.parametrize("of", MADE)
@pytest.mark.parametrize("command", MADE)
def test_a_log_is_resumed_by_the_command_that_began_it(resume, command, of):
    if command == of:
        return
    name = {"sweep": "a sweep", "find": "a find", "attention": "attention"}[of]
    told = f"{of}.jsonl is of {name}: resume it with 'mamf {of} --resume {of}.jsonl'"
    assert_refused(resume(command, log=of, kernel=False), told)


class Renumbered(SimulatedBackend):
    """The same card, by whatever number."""

    def __init__(self, index=0):
        super().__init__(index)
        self.info = dataclasses.replace(self.info, uuid_hash="abc")


def test_a_card_that_got_another_number_is_the_same_card(run, monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "device_count", classmethod(lambda cls: 2))
    options = ["sweep", "--backend", "test_resuming:Renumbered", *MATMUL]
    assert run(*options, "--m", "256", "--output", "run.jsonl")[0] == 0
    assert run(*options, "--resume", "run.jsonl", "--device", "1")[0] == 0


@pytest.mark.parametrize("command", MADE)
def test_a_log_is_continued_in_its_own_file(resume, command):
    assert_refused(resume(command, "--output", "other.jsonl"), "leave --output out")


# -- ceilings ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Logs of two finds and of attention kernels beside the first one's ceiling."""
    folder = tmp_path_factory.mktemp("ceilings")
    for name, seed in (("one", "0"), ("two", "1")):
        options = [*BACKEND, *MATMUL, "--regime", "burst", "--budget", "10s", "--seed", seed]
        assert main(["find", *options, "--output", str(folder / name)]) == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def beside(run, found, tmp_path, monkeypatch):
    """Resume attention kernels that were measured beside the ceiling ``one``."""
    monkeypatch.setattr("mamf.cli.attention.installed_kernel", lambda name: SimulatedMatmul())
    for name, log in found.items():
        (tmp_path / name).write_bytes(log)
    options = ["attention", *BACKEND]
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


@pytest.mark.parametrize("command", MADE)
def test_a_log_of_an_earlier_schema_is_not_gone_on_with(command, logs, tmp_path, capsys):
    """Its rounds are others, and its sustained figures of another statistic."""
    path = tmp_path / "old.jsonl"
    path.write_bytes(logs[command].replace(b'"schema": 5', b'"schema": 3', 1))
    assert main([command, *BACKEND, "--resume", str(path)]) == 2
    assert "is of schema 3" in capsys.readouterr().err
