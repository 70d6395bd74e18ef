"""Test the script that the workflows of .github run for a pull request. It reads only the logs that the pull request
adds, and writes the comment with the result.
"""

import copy
import io
import urllib.error
import urllib.request

import pull_request
import pytest
from contribution_logs import best, write
from pull_request import (
    MAX_LINES,
    MAX_LOG_BYTES,
    download_blob,
    download_logs,
    format_code_block,
    main,
)

from mamf.errors import UsageError

SHA = "0123456789abcdef0123456789abcdef01234567"


def make_file_entry(filename, status="added"):
    return {"filename": filename, "status": status, "sha": SHA}


def download(files, folder):
    notes = list(download_logs(files, folder, lambda sha: sha.encode()))
    return notes, [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def test_added_logs_are_written_and_generated_files_passed_over(tmp_path):
    log = "results/nvidia-h200/find-bfloat16-burst-20261122-020751-2.jsonl"
    files = [make_file_entry(log), make_file_entry("mamf/contributed.csv", "modified")]
    files += [make_file_entry(f"results/{name}README.md", "modified") for name in ("", "nvidia-h200/")]
    assert download(files, tmp_path) == ([], [log])
    assert (tmp_path / log).read_text() == SHA


@pytest.mark.parametrize(
    "file",
    [
        make_file_entry("mamf/cli/__init__.py"),
        make_file_entry(".github/workflows/ci.yml", "modified"),
        make_file_entry("results/../.github/workflows/ci.jsonl"),
        make_file_entry("results/a/../../b.jsonl"),
        make_file_entry("results/a/b/c.jsonl"),
        make_file_entry("/results/a/b.jsonl"),
        make_file_entry("results/a/.b.jsonl"),
        make_file_entry("results/a/b.jsonl\n"),
        make_file_entry("results/a/b.jsonl\x00.py"),
        make_file_entry("results/a/b.py"),
        make_file_entry("results/a/$(id).jsonl"),
        make_file_entry("results/-a/b.jsonl"),
        make_file_entry(f"results/a/{'b' * 300}.jsonl"),
        make_file_entry("results/a/b.jsonl", "modified"),
        make_file_entry("results/a/b.jsonl", "removed"),
        make_file_entry("results/a/b.jsonl", "renamed"),
    ],
    ids=lambda file: f"{file['status']} {file['filename'][:40]!r}",
)
def test_any_other_file_is_named_and_not_written(file, tmp_path):
    notes, written = download([file], tmp_path)
    assert written == []
    assert len(notes) == 1
    assert notes[0].startswith("not reviewed: ")


def test_a_log_of_the_base_branch_is_not_replaced(tmp_path):
    (tmp_path / "results" / "a").mkdir(parents=True)
    (tmp_path / "results" / "a" / "b.jsonl").write_text("theirs")
    assert download([make_file_entry("results/a/b.jsonl")], tmp_path)[0] == [
        "not reviewed: results/a/b.jsonl (the base branch already has a file with this name)"
    ]
    assert (tmp_path / "results" / "a" / "b.jsonl").read_text() == "theirs"


@pytest.mark.parametrize("name", ["submitters.txt", "maintainers.txt"])
@pytest.mark.parametrize("field", ["filename", "previous_filename"])
def test_a_pull_request_cannot_change_the_lists_of_accounts(name, field, tmp_path):
    files = [
        make_file_entry("results/a/b.jsonl"),
        make_file_entry("results/x.txt", "renamed") | {field: f"results/{name}"},
    ]
    with pytest.raises(UsageError, match="a workflow writes it"):
        download(files, tmp_path)
    assert not (tmp_path / "results").exists()


@pytest.fixture
def github_requests(monkeypatch):
    for name, value in {"API_URL": "https://api.test", "REPOSITORY": "o/r"}.items():
        monkeypatch.setenv(f"GITHUB_{name}", value)
    monkeypatch.setenv("GH_TOKEN", "secret")
    requests = []

    def answer(request, timeout):
        requests.append(request)
        return io.BytesIO(b"0123456789")

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    return requests


def test_a_blob_is_downloaded_by_its_hash_and_a_redirect_gets_no_token(github_requests):
    assert download_blob(SHA) == b"0123456789"
    assert github_requests[0].full_url == f"https://api.test/repos/o/r/git/blobs/{SHA}"
    assert github_requests[0].unredirected_hdrs == {"Authorization": "Bearer secret"}
    assert "Authorization" not in github_requests[0].headers


def test_a_large_blob_is_refused(github_requests, monkeypatch):
    monkeypatch.setattr(pull_request, "MAX_LOG_BYTES", 9)
    with pytest.raises(UsageError, match="has more than"):
        download_blob(SHA)
    assert MAX_LOG_BYTES > 9


def test_a_path_in_place_of_a_hash_is_refused(github_requests):
    with pytest.raises(UsageError, match="is not a hash"):
        download_blob("../../secrets")
    assert github_requests == []


# -- the comment -------------------------------------------------------------------------------------------------------


@pytest.fixture
def review_log(run, sweep_records, tmp_path, capsys):
    """Return a function that reviews a log in a results folder without other logs. It returns the exit code and the
    comment.
    """

    def review(records):
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "README.md").write_text("")
        assert run("results", "submit", str(write(tmp_path / "run.jsonl", sweep_records)))[0] == 0
        (path,) = (tmp_path / "results").rglob("*.jsonl")
        write(path, records)
        folder = tmp_path / "review"
        folder.mkdir()
        (folder / "added.txt").write_text(f"{path.relative_to(tmp_path).as_posix()}\n")
        (folder / "check.json").write_text(run("results", "check", "results", "--format", "json")[1])
        run("results", "table")
        pages = sorted((tmp_path / "results").rglob("README.md"))
        (folder / "after.md").write_text("".join(page.read_text() for page in pages))
        capsys.readouterr()
        return main(["comment", str(folder), "--commit", SHA]), capsys.readouterr().out

    return review


def test_an_accepted_log_is_shown_with_its_rows(review_log, sweep_records):
    code, text = review_log(sweep_records)
    assert code == 0
    assert text.startswith(f"**mamf results check: accepted** at {SHA}\n\n    results/nvidia-h100-80gb-hbm3/")
    assert "\n## Unconfirmed" in text
    assert "\n| bfloat16, burst, " in text
    assert "[log](" not in text


def test_a_rejected_log_is_shown_with_its_errors_and_no_rows(review_log, sweep_records):
    records = copy.deepcopy(sweep_records)
    best(records)["tflops"]["median"] *= 1.05
    code, text = review_log(records)
    assert code == 1
    assert "not accepted" in text
    assert "\n      error: row-mismatch: " in text
    assert "| burst |" not in text


def test_without_a_log_nothing_is_accepted(tmp_path, capsys):
    notes = [*("not reviewed: a.py (added)" for _ in range(MAX_LINES)), "not reviewed: b.py (modified)"]
    (tmp_path / "notes.txt").write_text("\n".join(notes))
    assert main(["comment", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("**mamf results check: no log to check**\n\n    not reviewed: b.py (modified)\n")
    assert text.endswith("    1 more lines\n\n")


@pytest.mark.parametrize("text", ["```\n# x", "\r\n# x", "~~~", "</code></pre><img src=x>", "\u2028# x", "a\x0b# x"])
def test_no_text_can_leave_the_code_block(text):
    code_block = format_code_block([text])
    assert all(line == "" or line.startswith("    ") for line in code_block.splitlines())
