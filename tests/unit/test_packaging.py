"""Test the links of the README on PyPI, and that all files that contain the version agree."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
URL = "https://forge.test/owner/name"


@pytest.fixture(scope="module")
def setup_file():
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md)", f"[a]({URL}/blob/v1/docs/a.md)"),
        ("[a](docs/a.md#part), [b](backends)", f"[a]({URL}/blob/v1/docs/a.md#part), [b]({URL}/blob/v1/backends)"),
        ("![A picture](docs/a.png)", f"![A picture]({URL}/raw/v1/docs/a.png)"),
        ('x\n[run]: results/a.jsonl "best"\n', f'x\n[run]: {URL}/blob/v1/results/a.jsonl "best"\n'),
        ("[a](https://x.test/y), [b](#part), [c](mailto:x)", "[a](https://x.test/y), [b](#part), [c](mailto:x)"),
        ("```\n[a](b)\n```\n[a](b)", f"```\n[a](b)\n```\n[a]({URL}/blob/v1/b)"),
        ("batch[0](x) is no link", f"batch[0]({URL}/blob/v1/x) is no link"),
    ],
)
def test_relative_links_become_absolute(text, expected, setup_file):
    assert setup_file["absolute_links"](text, f"{URL}/", "v1") == expected


def test_the_readme_has_no_relative_link_on_pypi(setup_file, monkeypatch):
    monkeypatch.setenv("MAMF_REPOSITORY_URL", URL)
    metadata = setup_file["described"]()
    links = re.findall(r"\]\(([^)]*)\)|^\[[^\]]+\]: *(\S+)", metadata["long_description"], re.M)
    targets = [inline or defined for inline, defined in links]
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert metadata["project_urls"]["Repository"] == URL


def test_the_citation_and_the_changelog_name_the_last_release():
    version = re.search(r'^version = "(.*)"$', PYPROJECT, re.M)[1]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    released = re.search(r'^date-released: "(.*)"$', citation, re.M)[1]
    last_release = re.search(r"^version: (.*)$", citation, re.M)[1]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {last_release} ({released})\n" in changelog
    assert version == last_release or (version.endswith(".dev0") and "\n## Unreleased\n" in changelog)


def test_the_list_of_tests_for_the_oldest_torch_names_existing_tests():
    lines = (ROOT / ".ci" / "oldest-tests").read_text(encoding="utf-8").splitlines()
    left_out = [line.partition("=")[2].partition("::") for line in lines if line.startswith("--")]
    assert left_out
    for path, _, name in left_out:
        source = (ROOT / path).read_text(encoding="utf-8")
        # The methods of a class with contract tests are in mamf.testing.
        start = f"class {name.partition('::')[0]}(" if "::" in name else f"def {name.partition('[')[0]}("
        assert not name or start in source, f"{path} has no {name}"
