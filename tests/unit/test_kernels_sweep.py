"""Kernels of any operation by one command, in virtual time."""

import pytest

DEVICE = ["--backend", "mamf.testing:SimulatedBackend"]
KERNEL = ["--kernel", "mamf.testing:SimulatedAttention"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--operation", "atention"], "unknown operation 'atention' (did you mean 'attention'?)"),
        (["--operation", "attention", *KERNEL, "--set", "direction=up"], "'up'"),
        (["--operation", "attention", "--set", "seed=x"], "attention's seed: 'x' is not a whole number"),
        (["--operation", "attention", "--set", "seed=1", "seed=2"], "--set seed=2: this field is set twice"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(run, given, told):
    code, out, err = run("sweep", *DEVICE, *given)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert told in err


def test_kernels_of_one_operation_are_listed_alone(run):
    code, out, _ = run("kernels", *DEVICE, "--operation", "attention")
    assert code == 0
    assert "\nattention:\n" in out
    assert "matmul" not in out
    assert run("kernels", *DEVICE, "--operation", "nobodys")[0] == 2
