"""Test the site of results/: the content of its pages and its feed, and which files a build may change."""

import csv
import html
import json
import os
import re
from pathlib import Path

import pytest
from contribution_logs import legacy_run

from mamf.cli import main
from mamf.errors import RunLogError, UsageError
from mamf.logs.legacy import write_legacy_log
from mamf.pages.site import FILE_LIST_NAME, build_site, choose_page_names
from mamf.pages.site_data import ALL_TIERS, read_site_data

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
H200 = "nvidia-h200"
FIND = RESULTS / H200 / "find-float64-burst-sustained-20261122-181650.jsonl"
OTHER_FIND = RESULTS / H200 / "find-float64-burst-sustained-20261122-020453.jsonl"
ATTENTION = RESULTS / H200 / "attention-bfloat16-fwd-bwd-burst-20261122-165751.jsonl"
EPYC = RESULTS / "amd-epyc" / "find-float32-burst-sustained-20261122-010619.jsonl"


def put(root, source, file="", slowed=1.0, torch="2.11.0", by="maintainer", **device):
    """Copy a log into a results folder with changes, and return its path.

    - ``file``: the name of the copy; empty for the name of the log.
    - ``slowed``: the factor by which the copy is slower.
    - ``by``: the account that submitted the log.
    - ``device``: fields of the device to change.
    """
    records = [json.loads(line) for line in source.read_text().splitlines()]
    records[0]["device"] |= device
    records[0]["environment"]["packages"]["torch"] = torch
    for record in records[1:]:
        if record.get("samples_seconds"):
            record["samples_seconds"] = [seconds * slowed for seconds in record["samples_seconds"]]
        if record["record"] == "ceiling":
            record["tflops"] /= slowed
            record["interval_tflops"] = [end / slowed for end in record["interval_tflops"]]
    path = root / source.parent.name / (file or source.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (root / "maintainers.txt").write_text("maintainer\n")
    with (root / "submitters.txt").open("a") as submitters:
        submitters.write(f"{path.relative_to(root).as_posix()} {by}\n")
    return path


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


def built(root, output=None, **options):
    """Build a site and return the text of each of its files, by path."""
    output = output or root.parent / "site"
    build_site(root, output, **options)
    return {path.relative_to(output).as_posix(): path.read_text() for path in output.rglob("*") if path.is_file()}


def feed(files):
    return json.loads(files["index.json"])["ceilings"]


def links(page):
    return [html.unescape(address) for address in re.findall(r'<a href="([^"]*)"', page)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a results folder with four real logs, and the files of its site."""
    root = tmp_path_factory.mktemp("whole") / "results"
    for source in (FIND, OTHER_FIND, ATTENTION, EPYC):
        put(root, source)
    return root, built(root)


# -- pages -------------------------------------------------------------------------------------------------------------


def test_every_link_within_the_site_and_to_a_log_leads_to_a_file(whole):
    root, files = whole
    site = root.parent / "site"
    pages = {name: text for name, text in files.items() if name.endswith(".html")}
    assert set(pages) == {"index.html", "devices/amd-epyc.html", "devices/nvidia-h200.html"}
    for name, page in pages.items():
        own = [address for address in links(page) if "://" not in address and not address.startswith("#")]
        assert own and all((site / name).parent.joinpath(address).is_file() for address in own), name
        assert all(f'id="{address[1:]}"' in page for address in links(page) if address.startswith("#")), name


def test_the_front_page_has_the_figure_interval_share_and_tier_of_each_ceiling(whole):
    page = whole[1]["index.html"]
    best = next(each for each in feed(whole[1]) if (each["dtype"], each["regime"]) == ("float64", "burst"))
    for text in (f"{best['tflops']:.2f}", f"{best['low']:.2f} to {best['high']:.2f}", "97.1", "unconfirmed", "float64"):
        assert text in page
    assert "2 devices" in page and "4 logs" in page
    assert page.count("<figure") >= 2  # one picture per dtype


def test_a_device_page_has_cards_attention_energy_and_every_log(whole):
    root, files = whole
    page = files["devices/nvidia-h200.html"]
    for text in ("Cards side by side", "Attention kernels", "MAMFU", "J/TFLOP", "driver 580"):
        assert text in page
    for log in (root / H200).iterdir():
        assert f"../../results/{H200}/{log.name}" in links(page)
    hashes = {json.loads(path.read_text().splitlines()[0])["device"]["uuid_hash"] for path in (FIND, OTHER_FIND)}
    assert len(hashes) == 2 and all(f"card {each}" in page for each in hashes)


def test_logs_can_be_elsewhere(root):
    put(root, EPYC)
    files = built(root, logs_address="https://example.org/results")
    address = f"https://example.org/results/amd-epyc/{EPYC.name}"
    assert all(address in links(files[name]) for name in ("index.html", "devices/amd-epyc.html"))
    with pytest.raises(UsageError, match="must begin with https"):
        build_site(root, root.parent / "other", "javascript:alert(1)//")


def test_an_empty_folder_has_a_page_that_asks_for_logs(root):
    files = built(root)
    assert "Nobody has contributed a log yet" in files["index.html"] and "mamf results submit" in files["index.html"]
    assert feed(files) == [] and files["ceilings.csv"] == ""


# -- the feed ----------------------------------------------------------------------------------------------------------


def test_the_feed_names_the_device_as_torch_does_with_its_ceiling_and_log(whole):
    (best,) = [each for each in feed(whole[1]) if (each["dtype"], each["regime"]) == ("float64", "sustained")]
    assert best["device"] == "NVIDIA H200" and best["datasheet_tflops"] == 67 and best["tier"] == "complete"
    assert best["low"] < best["tflops"] < best["high"] and best["cards"] == 2
    assert best["lowest_tflops"] < best["tflops"]
    assert (whole[0] / best["source"]).is_file() and best["software"]["torch"] == "2.11.0"


def test_the_csv_has_the_rows_of_the_feed(whole):
    rows = list(csv.DictReader(whole[1]["ceilings.csv"].splitlines()))
    assert [row["source"] for row in rows] == [each["source"] for each in feed(whole[1])]
    assert list(rows[0]) == list(feed(whole[1])[0])


def test_the_documentation_has_every_field_and_tier(whole):
    text = (ROOT / "docs" / "site.md").read_text()
    assert json.loads(whole[1]["index.json"])["schema"] == 1
    assert all(f"`{name}`" in text for name in feed(whole[1])[0]) and all(f"| {tier} |" in text for tier in ALL_TIERS)


# -- logs --------------------------------------------------------------------------------------------------------------


def test_two_cards_are_two_and_the_slower_is_the_lowest(root):
    put(root, FIND, "a.jsonl", uuid_hash="one")
    put(root, FIND, "b.jsonl", uuid_hash="two", slowed=1.001)
    put(root, FIND, "c.jsonl", uuid_hash="two", slowed=1.002)
    lines = [line for line in read_site_data(root).ceilings if line.regime == "burst"]
    assert [[entry.log_path.name for entry in line.card_rates] for line in lines] == [["a.jsonl", "b.jsonl"]]


def test_figures_of_mamf_finder_are_a_tier_under_their_device(root):
    put(root, FIND)
    write_legacy_log(legacy_run(device="NVIDIA H200"), root / H200 / "finder.jsonl")
    (legacy,) = [each for each in feed(built(root)) if each["tier"] == "legacy"]
    assert legacy["vendor"] == "NVIDIA" and legacy["regime"] == "mamf-finder's MAMF" and legacy["tflops"] == 815.5
    assert legacy["datasheet_tflops"] == 989 and legacy["low"] is None


def test_a_withdrawn_log_takes_its_page_along(root):
    put(root, FIND)
    path = put(root, EPYC)
    assert "devices/amd-epyc.html" in built(root)
    path.unlink()
    files = built(root)
    assert "devices/amd-epyc.html" not in files and "EPYC" not in files["index.html"]


def test_a_log_that_cannot_be_read_is_named_and_the_site_stays(root):
    put(root, EPYC)
    before = built(root)
    (root / "amd-epyc" / "broken.jsonl").write_text("{}\n")
    with pytest.raises(RunLogError, match=r"broken\.jsonl"):
        built(root)
    (root / "amd-epyc" / "broken.jsonl").unlink()
    assert built(root) == before


# -- names -------------------------------------------------------------------------------------------------------------

HOSTILE = [
    *("", " ", ".", "..", "../../etc/passwd", "/etc/passwd", "C:\\Windows", "CON", "nul", "com1", "index", "a" * 900),
    *(
        "昇腾 910B",
        "昇騰 910B",
        "H200",
        "h200",
        "h200!",
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "a\x1b\u202e",
    ),
]


def test_names_of_pages_are_safe_and_different_on_every_file_system():
    names = choose_page_names(HOSTILE)
    assert set(names) == set(HOSTILE) and len({name.lower() for name in names.values()}) == len(HOSTILE)
    for name in names.values():
        assert re.fullmatch(r"[a-z0-9_-]+\.html", name) and len(name) < 120
        assert not re.fullmatch(r"(con|prn|aux|nul|com\d|lpt\d)\.html", name)
    assert choose_page_names(reversed(HOSTILE)) == names


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_same_logs_give_the_same_bytes(root):
    put(root, FIND)
    put(root, EPYC)
    assert built(root) == built(root, root.parent / "again")


def test_a_folder_with_other_files_is_refused_and_nothing_is_written(root):
    output = root.parent / "mine"
    output.mkdir()
    (output / "index.html").write_text("mine")
    with pytest.raises(UsageError, match=r"that 'mamf results site' did not write, such as index\.html"):
        build_site(root, output)
    assert [path.name for path in output.iterdir()] == ["index.html"]
    with pytest.raises(UsageError, match="is inside"):
        build_site(root, root / "site")


def test_a_list_that_names_files_elsewhere_removes_none(root):
    site = root.parent / "site"
    built(root)
    (root.parent / "precious").write_text("mine")
    (site / FILE_LIST_NAME).write_text((site / FILE_LIST_NAME).read_text() + "\n../precious\n")
    built(root)
    assert (root.parent / "precious").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="creating a symbolic link on Windows needs a privilege")
def test_a_link_is_not_followed(root):
    site = root.parent / "site"
    built(root)
    target = root.parent / "target"
    target.write_text("mine")
    (site / "index.html").unlink()
    (site / "index.html").symlink_to(target)
    with pytest.raises(UsageError, match=r"index\.html"):
        build_site(root, site)
    assert target.read_text() == "mine"


def test_the_command_writes_a_site_and_says_where(root, capsys):
    put(root, EPYC)
    output = root.parent / "out"
    assert main(["results", "site", "--results", str(root), "--output", str(output)]) == 0
    assert f"{output / 'index.html'} (1 log of 1 device)" in capsys.readouterr().out
    assert main(["results", "site", "--results", str(root / "missing"), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert "there is no folder" in error and error.count("\n") == 1
