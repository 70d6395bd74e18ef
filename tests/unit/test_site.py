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


def add_log(root, source, name="", slowdown=1.0, **device):
    """Copy a log into a results folder with changes, as submitted by a maintainer, and return its path.

    - ``name``: the name of the copy; empty for the name of the log.
    - ``slowdown``: the factor by which the copy is slower.
    - ``device``: fields of the device to change.
    """
    records = [json.loads(line) for line in source.read_text().splitlines()]
    records[0]["device"] |= device
    records[0]["environment"]["packages"]["torch"] = "2.11.0"
    for record in records[1:]:
        if record.get("samples_seconds"):
            record["samples_seconds"] = [seconds * slowdown for seconds in record["samples_seconds"]]
        if record["record"] == "ceiling":
            record["tflops"] /= slowdown
            record["interval_tflops"] = [end / slowdown for end in record["interval_tflops"]]
    path = root / source.parent.name / (name or source.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (root / "maintainers.txt").write_text("maintainer\n")
    with (root / "submitters.txt").open("a") as submitters:
        submitters.write(f"{path.relative_to(root).as_posix()} maintainer\n")
    return path


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


def build_and_read(root, output=None, **options):
    """Build a site and return the text of each of its files, by path."""
    output = output or root.parent / "site"
    build_site(root, output, **options)
    return {path.relative_to(output).as_posix(): path.read_text() for path in output.rglob("*") if path.is_file()}


def read_feed(files):
    return json.loads(files["index.json"])["ceilings"]


def find_links(page):
    return [html.unescape(address) for address in re.findall(r'<a href="([^"]*)"', page)]


@pytest.fixture(scope="module")
def full_site(tmp_path_factory):
    """Return a results folder with four real logs, and the files of its site."""
    root = tmp_path_factory.mktemp("whole") / "results"
    for source in (FIND, OTHER_FIND, ATTENTION, EPYC):
        add_log(root, source)
    return root, build_and_read(root)


# -- pages -------------------------------------------------------------------------------------------------------------


def test_every_link_within_the_site_and_to_a_log_leads_to_a_file(full_site):
    root, files = full_site
    site = root.parent / "site"
    pages = {name: text for name, text in files.items() if name.endswith(".html")}
    assert set(pages) == {"index.html", "devices/amd-epyc.html", "devices/nvidia-h200.html"}
    for name, page in pages.items():
        file_addresses = [
            address for address in find_links(page) if "://" not in address and not address.startswith("#")
        ]
        assert file_addresses, name
        assert all((site / name).parent.joinpath(address).is_file() for address in file_addresses), name
        assert all(f'id="{address[1:]}"' in page for address in find_links(page) if address.startswith("#")), name


def test_the_front_page_has_the_figure_interval_share_and_tier_of_each_ceiling(full_site):
    page = full_site[1]["index.html"]
    best = next(each for each in read_feed(full_site[1]) if (each["dtype"], each["regime"]) == ("float64", "burst"))
    for text in (f"{best['tflops']:.2f}", f"{best['low']:.2f} to {best['high']:.2f}", "97.1", "unconfirmed", "float64"):
        assert text in page
    assert "2 devices" in page and "4 logs" in page
    assert page.count("<figure") >= 2  # one picture per dtype


def test_a_device_page_has_cards_attention_energy_and_every_log(full_site):
    root, files = full_site
    page = files["devices/nvidia-h200.html"]
    for text in ("Cards side by side", "Attention kernels", "MAMFU", "J/TFLOP", "driver 580"):
        assert text in page
    for log in (root / H200).iterdir():
        assert f"../../results/{H200}/{log.name}" in find_links(page)
    hashes = {json.loads(path.read_text().splitlines()[0])["device"]["uuid_hash"] for path in (FIND, OTHER_FIND)}
    assert len(hashes) == 2 and all(f"card {each}" in page for each in hashes)


def test_logs_can_be_linked_at_another_address(root):
    add_log(root, EPYC)
    files = build_and_read(root, logs_address="https://example.org/results")
    address = f"https://example.org/results/amd-epyc/{EPYC.name}"
    assert all(address in find_links(files[name]) for name in ("index.html", "devices/amd-epyc.html"))
    with pytest.raises(UsageError, match="must begin with https"):
        build_site(root, root.parent / "other", "javascript:alert(1)//")


def test_an_empty_folder_has_a_page_that_asks_for_logs(root):
    files = build_and_read(root)
    assert "Nobody has contributed a log yet" in files["index.html"] and "mamf results submit" in files["index.html"]
    assert read_feed(files) == [] and files["ceilings.csv"] == ""


# -- the feed ----------------------------------------------------------------------------------------------------------


def test_the_feed_names_the_device_as_torch_does_with_its_ceiling_and_log(full_site):
    (best,) = [each for each in read_feed(full_site[1]) if (each["dtype"], each["regime"]) == ("float64", "sustained")]
    assert best["device"] == "NVIDIA H200" and best["datasheet_tflops"] == 67 and best["tier"] == "complete"
    assert best["low"] < best["tflops"] < best["high"] and best["cards"] == 2
    assert best["lowest_tflops"] < best["tflops"]
    assert (full_site[0] / best["source"]).is_file() and best["software"]["torch"] == "2.11.0"


def test_the_csv_has_the_rows_of_the_feed(full_site):
    rows = list(csv.DictReader(full_site[1]["ceilings.csv"].splitlines()))
    assert [row["source"] for row in rows] == [each["source"] for each in read_feed(full_site[1])]
    assert list(rows[0]) == list(read_feed(full_site[1])[0])


def test_the_documentation_has_every_field_and_tier(full_site):
    text = (ROOT / "docs" / "site.md").read_text()
    assert json.loads(full_site[1]["index.json"])["schema"] == 1
    assert all(f"`{name}`" in text for name in read_feed(full_site[1])[0])
    assert all(f"| {tier} |" in text for tier in ALL_TIERS)


# -- logs --------------------------------------------------------------------------------------------------------------


def test_each_card_has_its_best_rate_and_the_slowest_card_is_last(root):
    add_log(root, FIND, "a.jsonl", uuid_hash="one")
    add_log(root, FIND, "b.jsonl", uuid_hash="two", slowdown=1.001)
    add_log(root, FIND, "c.jsonl", uuid_hash="two", slowdown=1.002)
    ceilings = [ceiling for ceiling in read_site_data(root).ceilings if ceiling.regime == "burst"]
    assert [[entry.log_path.name for entry in ceiling.card_rates] for ceiling in ceilings] == [["a.jsonl", "b.jsonl"]]


def test_figures_of_mamf_finder_have_their_own_tier_under_their_device(root):
    add_log(root, FIND)
    write_legacy_log(legacy_run(device="NVIDIA H200"), root / H200 / "finder.jsonl")
    (legacy,) = [each for each in read_feed(build_and_read(root)) if each["tier"] == "legacy"]
    assert legacy["vendor"] == "NVIDIA" and legacy["regime"] == "mamf-finder's MAMF" and legacy["tflops"] == 815.5
    assert legacy["datasheet_tflops"] == 989 and legacy["low"] is None


def test_the_page_of_a_withdrawn_log_is_removed(root):
    add_log(root, FIND)
    path = add_log(root, EPYC)
    assert "devices/amd-epyc.html" in build_and_read(root)
    path.unlink()
    files = build_and_read(root)
    assert "devices/amd-epyc.html" not in files and "EPYC" not in files["index.html"]


def test_a_log_that_cannot_be_read_is_named_and_the_site_stays(root):
    add_log(root, EPYC)
    before = build_and_read(root)
    (root / "amd-epyc" / "broken.jsonl").write_text("{}\n")
    with pytest.raises(RunLogError, match=r"broken\.jsonl"):
        build_and_read(root)
    (root / "amd-epyc" / "broken.jsonl").unlink()
    assert build_and_read(root) == before


# -- names -------------------------------------------------------------------------------------------------------------

HOSTILE_NAMES = [
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
    names = choose_page_names(HOSTILE_NAMES)
    assert set(names) == set(HOSTILE_NAMES) and len({name.lower() for name in names.values()}) == len(HOSTILE_NAMES)
    for name in names.values():
        assert re.fullmatch(r"[a-z0-9_-]+\.html", name) and len(name) < 120
        assert not re.fullmatch(r"(con|prn|aux|nul|com\d|lpt\d)\.html", name)
    assert choose_page_names(reversed(HOSTILE_NAMES)) == names


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_same_logs_give_the_same_bytes(root):
    add_log(root, FIND)
    add_log(root, EPYC)
    assert build_and_read(root) == build_and_read(root, root.parent / "again")


def test_a_folder_with_other_files_is_refused_and_nothing_is_written(root):
    output = root.parent / "mine"
    output.mkdir()
    (output / "index.html").write_text("mine")
    with pytest.raises(UsageError, match=r"that 'mamf results site' did not write, such as index\.html"):
        build_site(root, output)
    assert [path.name for path in output.iterdir()] == ["index.html"]
    with pytest.raises(UsageError, match="is inside"):
        build_site(root, root / "site")


def test_a_file_list_cannot_remove_files_outside_the_site(root):
    site = root.parent / "site"
    build_and_read(root)
    (root.parent / "precious").write_text("mine")
    (site / FILE_LIST_NAME).write_text((site / FILE_LIST_NAME).read_text() + "\n../precious\n")
    build_and_read(root)
    assert (root.parent / "precious").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="creating a symbolic link on Windows needs a privilege")
def test_a_symbolic_link_is_not_followed(root):
    site = root.parent / "site"
    build_and_read(root)
    target = root.parent / "target"
    target.write_text("mine")
    (site / "index.html").unlink()
    (site / "index.html").symlink_to(target)
    with pytest.raises(UsageError, match=r"index\.html"):
        build_site(root, site)
    assert target.read_text() == "mine"


def test_the_command_writes_a_site_and_says_where(root, capsys):
    add_log(root, EPYC)
    output = root.parent / "out"
    assert main(["results", "site", "--results", str(root), "--output", str(output)]) == 0
    assert f"{output / 'index.html'} (1 log of 1 device)" in capsys.readouterr().out
    assert main(["results", "site", "--results", str(root / "missing"), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert "there is no folder" in error and error.count("\n") == 1
