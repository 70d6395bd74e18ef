"""Test that mamf removes private data from each record that it writes to a log."""

import json
from pathlib import Path

import pytest

from mamf.logs.writer import RunLogWriter
from mamf.machine.privacy import scrub_record, scrub_text

WORD = "Zq7x9Kd2Lm4" * 5
HEX = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"


def read_private_texts():
    """Yield pairs of a text and its private part, which must be removed.

    No secret is real. In the file, ``~`` splits each text that looks like a secret in two, and placeholders replace its
    long parts, so that secret scanners do not report this repository.
    """
    for line in (Path(__file__).parent / "data" / "private_texts.txt").read_text().splitlines():
        text = line.replace("~", "").replace("{WORD}", WORD).replace("{HEX}", HEX).replace("\\n", "\n")
        yield tuple(text.split("\t"))


PRIVATE_TEXTS = list(read_private_texts())


@pytest.mark.parametrize("template", ["{}", "see {} ,x", "mamf profile {} --output <path>/x"])
@pytest.mark.parametrize(("text", "private"), PRIVATE_TEXTS, ids=range(len(PRIVATE_TEXTS)))
def test_a_private_text_is_removed(text, private, template):
    clean = scrub_text(template.format(text))
    assert private not in clean
    assert scrub_text(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        *("torch 2.11.0+cu130", "580.159.04", "Linux 6.18.44-fc-v595 x86_64", "float8_e4m3fn", "1024x2048x512", "a/b"),
        *("top -o %CPU   # see what runs", "https://github.com/stas00/ml-engineering", "--nodes 2 --node-rank 0"),
        *(
            "mamf sweep --output <path>/run.jsonl",
            "torchrun --nproc-per-node 8 train.py --lr 3e-4",
            "--max-tokens 4096",
        ),
        *("1.2.3", "12:34:56", "2026-11-21T16:36:00+00:00", "9f86d081884c7d65", "cuda:0", "x[1::2]", "c10::Error"),
        *("std::bad::face", "serial execution took 3 s", "ran in serial, 4 times", "ratio 1:2:3", "keys=8 values=8"),
        *("4096 tokens: 8 experts", "tokens=4096", "cuBLAS 12.9.0.13 to 13.1.0.3", "cublaslt[3]", "the key figure"),
        *(
            "passed 3 of 4",
            "token_dim x 2",
            "a secretary",
            "sk-learn",
            "eyJ",
            "10-11-12-13",
            "user time 3 s",
            "token=12",
        ),
        *(
            "FLOP per token: 6.2e9",
            "forward pass: 3 ms",
            "backward pass is slow",
            "bypass=1",
            "global-memory-bandwidth",
        ),
        *("b1h16q4096k4096d128", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1"),
        *("--include-node all", "burst, int8, direction to_host", "hf_attention", "on host memory", "to one node"),
    ],
)
def test_text_that_is_not_private_stays(text):
    assert scrub_text(text) == text


def test_fields_and_arguments_are_judged_by_their_names():
    record = {
        "variables": {"HF_TOKEN": "abc", "apiKey": "abc", "SLURM_JOB_USER": "abc", "OMP_NUM_THREADS": "4"},
        "argv": ["train.py", "--password", "abc", "--lr", "3"],
        "best": {"burst, int8, direction to_host": "torch"},
    }
    clean = scrub_record(record)
    assert "abc" not in json.dumps(clean)
    assert clean["variables"]["OMP_NUM_THREADS"] == "4"
    assert clean["argv"] == ["train.py", "--password", "<secret>", "--lr", "3"]
    assert clean["best"] == record["best"]


def test_a_log_never_contains_a_secret(tmp_path):
    path = tmp_path / "run.jsonl"
    fields = {"command": "mamf profile train.py --password hunter2", "notes": ["see g" + f"hp_{WORD[:36]}"]}
    with RunLogWriter.create(path, fields) as log:
        log.write("resume", {"notes": "postgres://jane:hunter2@db"})
    assert "hunter2" not in path.read_text() and WORD[:9] not in path.read_text()


def test_a_text_that_is_too_long_is_cut():
    clean = scrub_text("x y " * 10_000)
    assert len(clean) < 10_000
    assert clean.endswith(" (cut)")


@pytest.mark.parametrize(
    "text",
    [
        *("2001::" + "a" * 9000 + "g", "2001:" * 2000, "/a b" * 2500, "\\ " * 5000, "'/" * 5000, "sn:" * 3000),
        *("a-" * 4900, "--" * 4900, "a_key" * 1900, "token " * 1600, "a.b@" * 1300, "curl -x" * 1300),
    ],
    ids=lambda text: text[:6],
)
def test_a_long_repetitive_text_is_scrubbed_completely(text):
    """Check texts on which a rule with nested repeats would take minutes.

    The texts are short enough that mamf cuts neither them nor their scrubbed forms.
    """
    clean = scrub_text(text)
    assert not clean.endswith("(cut)")
    assert scrub_text(clean) == clean
