"""Check that code and docs contain no banned words and phrases. Some folders still have exceptions."""

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Banned phrases as regular expressions, each with suggestions for what to write instead.
PHRASES = {
    r"(is|are|was|were|be) told": "is printed, is reported, receives",
    r"somebody else's": "another process's, another user's",
    r"a stranger's": "third-party",
    r"goes on with": "resumes, continues",
    r"all the same": "(leave it out), anyway",
    r"by itself": "alone, (leave it out)",
    r"of (its|their|one's) own": "its own, a separate",
    r"(?<!there\s)(is|are|as) none": "is absent, is not a ...",
    r"what nobody asks for": "unused",
    r"for want of": "hidden, missing",
    r"not to be had": "not available",
    r"mend(s|ed|ing)?": "fix",
}
BANNED_IDENTIFIER = "told"
#: How many banned words and phrases a folder still contains. Lower a number when you remove some; never raise one.
ALLOWED_COUNTS = {
    "mamf/logs": 2,
}


def choose_counted_folder(path):
    """Return the folder under which findings in a file are counted.

    This is ``mamf/cli`` for a file in that package, ``mamf`` for a module directly in mamf, and otherwise the first
    folder of the path.
    """
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "mamf" and len(parts) > 2 else parts[0]


def find_identifier_lines(text):
    """Return the numbers of the lines that use the banned identifier as a name, not in a comment or a string."""
    if BANNED_IDENTIFIER not in text:
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        token.start[0]
        for token in tokens
        if token.type == tokenize.NAME and token.string.strip("_") == BANNED_IDENTIFIER
    ]


def find_banned_phrases(text, is_python):
    """Return (line number, message) for each banned word or phrase. A phrase may continue on the next line."""
    messages = [
        (line, f"{BANNED_IDENTIFIER!r} is an identifier: name the thing")
        for line in (find_identifier_lines(text) if is_python else ())
    ]
    for phrase, replacement in PHRASES.items():
        pattern = rf"\b{phrase}\b".replace(" ", r"\s+(?:#:? )?")
        for match in re.finditer(pattern, text):
            words = " ".join(match[0].split())
            messages.append((text.count("\n", 0, match.start()) + 1, f"{words!r}: write {replacement}"))
    return sorted(messages)


def yield_findings():
    paths = [path for folder in ("mamf", "backends", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
    paths += [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in paths:
        for line, message in find_banned_phrases(path.read_text(encoding="utf-8"), path.suffix == ".py"):
            yield choose_counted_folder(path), f"{path.relative_to(ROOT).as_posix()}:{line}: {message}"


@pytest.mark.docs
def test_code_and_docs_have_no_banned_phrases():
    findings = list(yield_findings())
    counts = Counter(folder for folder, _ in findings)
    over = {folder for folder, count in counts.items() if count > ALLOWED_COUNTS.get(folder, 0)}
    assert not over, "\n".join(message for folder, message in findings if folder in over)
    lower = {folder: counts[folder] for folder, allowed in ALLOWED_COUNTS.items() if counts[folder] < allowed}
    assert not lower, f"lower the numbers in ALLOWED_COUNTS, or remove those that are now 0: {lower}"
