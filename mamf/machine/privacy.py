"""Removes secrets, accounts, hosts, addresses and paths from everything that is written, because logs are published.

The writers of logs and folders call ``scrub_record`` for every record, so their callers need not. To recognize the
tokens of another service, add their prefix to ``_TOKENS``.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import re
import socket
from collections.abc import Sequence
from typing import Any

# Longer texts are cut, because searching them would take too long.
_MAX_TEXT_LENGTH = 10_000

# -- secrets -----------------------------------------------------------------------------------------------------------

# Regular expressions for the prefixes of access tokens. At least eight more characters follow a prefix.
_TOKENS = (
    r"gh[opsur]_|github_pat_|gl(?:pat|dt|rt|cbt|ptt|ft|soat|oas|agent|imt|ffct)-|AT[AC]TT3x|ATBB|sgp_|lin_api_|figd_|PMAK-"
    r"|hf_(?=[A-Za-z0-9]{16})|api_org_|sk-(?!learn)|[srp]k_(?:live|test)_|whsec_|nvapi-|r8_|gsk_|xai-|pplx-|tgp_v1_|csk-|jina_|tvly-|pcsk_"
    r"|lsv2_[ps][tk]_|rpa_|wandb_v1_|fo1_|FlyV1 |AKIA|ASIA|AROA|AIDA|ABSK|AIza|ya29\.|1//0|GOCSPX-|LTAI|AKID"
    r"|dapi(?=[0-9a-f])|xox[a-z]-|xoxe\.|xapp-|npm_|pypi-|rubygems_|SG\.|hv[sbr]\.|do[opr]_v1_|dckr_[op]at_|tskey-"
    r"|AGE-SECRET-KEY-|\d{8,10}:AA|eyJ(?=[\w-]*\.)|shp(?:at|ca|pa|ss)_|sntry[su]_|glsa_|glc_|dp\.[a-z]{2}\.|pscale_[a-z]+_"
    r"|pul-(?=[0-9a-f])|rdme_|sq0[a-z]{3}-|NRAK-|dt0c01\.|CFPAT-|HRKU-|sbp_|sb_secret_|nfp_|ntn_(?=\d)|secret_|ops_eyJ"
    r"|a[ks]-(?=[A-Za-z0-9]{22})|key-(?=[0-9a-f]{32})|ssh-[a-z0-9]+ AAAA|\$(?:2[aby]|[56])\$"
)
# Endings of the names of options, variables and fields with a secret value. After the endings of _COUNTABLE_NAME a
# number is kept, because it is a count.
_COUNTABLE_NAME = (
    r"token|(?:api|auth|access|secret|private|ssh|account|license|signing|encryption|master)key|[_-]key(?:[_-]?id)?"
)
_SECRET_NAME = (
    rf"password|passwd|secret|{_COUNTABLE_NAME}|(?<![a-z0-9])(?:pass_?phrase|pass_?code|passw|pwd|credentials?"
    r"|creds?|cookie|auth(?:orization)?|otp|dsn|sas|connection_?string|webhook(?:_?url)?)"
)
# Endings of the names of options, variables and fields that identify a user or a machine.
_PRIVATE_NAME = (
    r"host_?name|host|fqdn|node_?(?:name|list)|user_?name|log_?name|user|login|e_?mail|account(?:_?(?:name|id))?"
    r"|master_?addr|home(?:_?dir)?|cwd|(?:rdzv_?)?endpoint|server(?:_?name)?|ip_?addr(?:ess)?|uuid|serial(?:_?(?:number|no))?|asset_?tag"
)
_OPTION = r"(?<![\w-])--?[\w.-]{0,60}?"
_VALUE = r"(?![-<])(?:'[^']*'|\"[^\"]*\"|[^\s,;&'\"<>]+)+"
_NOT_A_COUNT = r"(?![\d.,]+(?:e[+-]?\d+)?(?![\w.-]))"


def _make_secret_pattern(prefix: str, separator: str) -> str:
    """Make a pattern for the name of a secret, its separator and its value. A count is not a secret value."""
    return (
        rf"({prefix}(?:(?:{_COUNTABLE_NAME}){separator}{_NOT_A_COUNT}|(?!{_COUNTABLE_NAME})(?:{_SECRET_NAME}){separator}))"
        rf"{_VALUE}"
    )


# -- hosts and addresses -----------------------------------------------------------------------------------------------

_LABEL = r"[a-z0-9][a-z0-9-]{0,62}"
_OWN_DOMAINS = "local|localdomain|lan|internal|intra|corp|cluster|home|private"
_PUBLIC_DOMAINS = (
    "com|net|org|edu|gov|io|ai|cloud|dev|at|au|be|ca|ch|cn|cz|de|dk|es|eu|fi|fr|il|in|it|jp|kr|nl|no|pl"
    "|ru|se|sg|tw|uk|us"
)
# URLs of these public sites are kept.
_PUBLIC_SITES = (
    r"(?:[\w-]+\.)*(?:github\.com|github\.io|githubusercontent\.com|huggingface\.co|pytorch\.org|nvidia\.com|amd\.com"
    r"|intel\.com|arxiv\.org|python\.org|pypi\.org|readthedocs\.io|wikipedia\.org|example\.(?:com|org))(?![\w.-]|:\d)"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# An IPv4 address that begins with less than 20 looks like a version (cuBLAS 12.1.3.1). It is matched only in a private
# range, after a word such as "host", or if one of its numbers is too high for a version.
_ADDRESS = rf"(?:10|127|[2-9]\d|1\d\d|2[0-4]\d|25[0-5]|1?\d(?=[\d.]*\.[12]\d\d))(?:\.{_OCTET}){{3}}"
# IPv6 addresses in use begin with a group of four digits, unlike times, slices and C++ names.
_GROUP = r"[0-9a-f]{1,4}"
_GROUPS = rf"{_GROUP}(?::{_GROUP}){{0,6}}"
_ADDRESS_6 = rf"(?:{_GROUP}:){{7}}{_GROUP}|(?=[23][0-9a-f]{{3}}:|f[cdef][0-9a-f]{{2}}:){_GROUPS}::(?:{_GROUPS})?"
_SERIAL = r"serial(?:[ _-]?(?:number|num|no)\b\.?)?|s/n|sn(?=[:#=])|(?:service|asset)[ _-]?tag"
_CLUSTER_NODE = r"(?:node|nid|login|worker|hpc|head-?node|gpu-?node|pod|slurm)-?(?:[a-z]{1,8}-?)?\d{1,6}(?:-\d{1,4})?"


def _compile_rules(*rules: tuple[str, str]) -> Sequence[tuple[re.Pattern[str], str]]:
    """Compile rules: patterns, each with its replacement."""
    return [(re.compile(pattern, re.IGNORECASE), by) for pattern, by in rules]


_SECRETS = _compile_rules(
    (r"-{5}BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-{5}[\w+/=\s\\-]*", "<secret>"),
    (rf"(?<![\w-])(?-i:{_TOKENS})[\w.+/=~$-]{{8,}}(?: [\w@.-]+(?=$))?", "<secret>"),
    (r"https://(?:hooks\.slack|discord(?:app)?)\.com/\S+|https://[\w.-]*webhook\.office\.com/\S+", "<secret>"),
    (r"\b((?:bearer|basic|digest)\s+)(?=[\w.+/=-]*[\d=A-Z])[\w.+/=~-]{8,}", r"\1<secret>"),
    # Options and variables with their values: --wandb-key X, HF_TOKEN=X, "password": "X".
    (_make_secret_pattern(_OPTION, r"['\"]?(?:\s*=\s*|\s+)"), r"\1<secret>"),
    (rf"({_OPTION}(?:pass|pw)(?:\s*=\s*|\s+)){_VALUE}|\b((?-i:[A-Z_]*_PASS)=){_VALUE}", r"\1\2<secret>"),
    (_make_secret_pattern(r"(?<![\w$])[\w.+-]{0,60}?", r"['\"]?\s?(?:=|:(?!//))\s?"), r"\1<secret>"),
    (r"\b((?:password|passwd|passphrase|passcode|pwd|secret|token)\s+(?:is|was)\s+)(?!<)[^\s,;]+", r"\1<secret>"),
    (r"\b((?:password|passwd|passphrase|passcode|pwd)\s+)(?!<|is\b|was\b)[^\s,;]+", r"\1<secret>"),
    (r"\b((?:sshpass|mysql\w*|docker login|redis-cli|htpasswd)\b[^|;&]{0,200}?\s-[pa]\s?)(?!<)\S+", r"\1<secret>"),
    (r"\b((?:curl|wget)\b[^|;&]{0,200}?\s-u\s?)(?!<)\S+", r"\1<secret>"),
    (r"\b((?:wandb|huggingface-cli|hf auth|comet) login\s+)(?![-<])\S+", r"\1<secret>"),
    (r"(?<![\w<./-])[0-9a-f]{32,}(?![\w.-])", "<secret>"),
)
_ADDRESSES = _compile_rules(
    (rf"\b[a-z][a-z0-9+.]{{1,20}}://(?!{_PUBLIC_SITES})(?!<)\S+", "<address>"),
    (rf"\b[\w.+-]{{1,64}}@(?!\d){_LABEL}(?:\.{_LABEL}){{0,8}}(?::[\w~./-]+)?", "<user>@<host>"),
    (rf"({_OPTION}(?<![a-z0-9])(?:{_PRIVATE_NAME})(?:=|\s+)){_VALUE}", r"\1<private>"),
    (rf"\b((?:[a-z]+_)*(?:{_PRIVATE_NAME})=){_VALUE}", r"\1<private>"),
    (rf"(?<![/\w.-])(?:{_LABEL}\.){{1,8}}(?:{_OWN_DOMAINS})\b(?![./(\w:-])", "<host>"),
    (rf"(?<![/\w.-])(?:{_LABEL}\.){{1,8}}(?:{_OWN_DOMAINS})(?=[:/])", "<host>"),
    (rf"(?<![/\w.-])(?:{_LABEL}\.){{2,8}}(?:{_PUBLIC_DOMAINS})\b(?![.(\w-])", "<host>"),
    (r"\bip(?:-\d{1,3}){4}\b|\b[a-z][a-z0-9-]{0,62}\[\d+-\d+(?:,\d+(?:-\d+)?)*\]", "<host>"),
    (rf"(?<![\w./-]){_CLUSTER_NODE}(?![\w-])|\bdgx-[a-z0-9]+-\d{{1,4}}\b", "<host>"),
    (r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<uuid>"),
    (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<uuid>"),
    (rf"(?<![a-z])(?:{_SERIAL})(?: is)?[\s:#=]{{1,40}}[\w-]*\d[\w-]*", "<serial number>"),
    (rf"(?<![\w:.])(?:{_ADDRESS_6})(?!\w|:\w)|\b[0-9a-f]{{2}}(?:[:-][0-9a-f]{{2}}){{5}}\b", "<address>"),
    (
        rf"(?<![\w.]){_ADDRESS}(?![\w.])"
        rf"|\b(?:ip|host|server|addr|address|ssh|ping|dns)[ :=]{{1,3}}{_OCTET}(?:\.{_OCTET}){{3}}(?![\w.])",
        "<address>",
    ),
    # A device's address on the PCI bus, or a host's address with a port.
    (r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b|\b\d{1,3}(?:\.\d{1,3}){3}\]?:\d+\b", "<address>"),
)
_SECRET_FIELD = re.compile(rf"(?i:(?:{_SECRET_NAME})|^key|^pass)$|(?<=[a-z])Key$")
_PRIVATE_FIELD = re.compile(rf"(?:^|(?<!\bto)[_.-]|(?<=[a-z])(?=[A-Z]))(?i:{_PRIVATE_NAME})$")
_SECRET_OPTION = re.compile(rf"{_OPTION}(?:{_SECRET_NAME}|pass|pw)", re.IGNORECASE)

# -- paths -------------------------------------------------------------------------------------------------------------

# The beginning of an absolute path, or of a path to a parent or home folder.
_ROOT = r"(?:file://[\w.-]*|~(?:[A-Za-z_][\w.-]*)?|(?:\.[/\\])?\.\.|[A-Za-z]:)?(?:/|\\+)"
# One part of a path, which may have escaped blanks.
_PART = r"(?:\\ |[^\s/\\'\"`<>|:;,()\[\]{}])+"
# A word in a folder name with blanks. It is not an option, the end of a file name or part of the sentence around it.
_WORD = r"(?:\\ |\.(?!\w)|[^\s/\\.'\"`<>|:;,()\[\]{}])+"
_NOT_A_NAME = r"(?![-~]|\.\.?[/\\]|(?:and|or|but|to|in|is|was|has|of|for|from|with|on|at|as|by|not)\b)"
_PATH = re.compile(rf"(?<![\w/\\.~>+-]){_ROOT}(?:(?:{_WORD} {_NOT_A_NAME}){{0,3}}{_PART}[/\\]+)*{_PART}", re.IGNORECASE)
_QUOTED_PATH = re.compile(
    rf"(?P<quote>['\"])(?P<option>[^'\"/\\=\s]*=)?{_ROOT}[^'\"]*[^'\"/\\](?P=quote)", re.IGNORECASE
)
_NUMBER_TYPES = frozenset({int, float})
_SEPARATOR = re.compile(r"/|\\+(?! )")
_USER_FOLDERS = ("home", "users")
_MIN_NAME_LENGTH = 2
# Names of accounts and hosts that do not identify anyone, and two-letter words that are common in messages.
_ANONYMOUS_NAMES = frozenset({"root", "user", "localhost", "admin", "ubuntu", "runner"})
_COMMON_WORDS = frozenset(
    {
        *("am", "an", "as", "at", "be", "by", "do", "go", "he", "if", "in", "is", "it", "me", "my", "no", "of", "ok"),
        *("on", "or", "so", "to", "up", "us", "we", "gb", "hz", "kb", "mb", "ms", "ns", "tb", "mm", "nn", "nt", "tn"),
        "tt",
    }
)


def scrub(text: str) -> str:
    """Replace secrets, accounts, hosts and addresses in a text, and cut paths outside the working directory to their
    last part. Scrubbing the result again changes nothing.
    """
    text = _replace_patterns(text)
    for pattern, by in _find_private_names():
        text = pattern.sub(by, text)
    return text


@functools.lru_cache(4096)  # all rows of a log have the same texts
def _replace_patterns(text: str) -> str:
    if len(text) > _MAX_TEXT_LENGTH:
        text = f"{text[: _MAX_TEXT_LENGTH - 100].rpartition(' ')[0]} (cut)"
    for pattern, by in _SECRETS:
        text = pattern.sub(by, text)
    if "/" in text or "\\" in text:  # every path has one
        text = _PATH.sub(lambda path: _shorten_path(path[0]), _QUOTED_PATH.sub(_shorten_quoted_path, text))
    for pattern, by in _ADDRESSES:
        text = pattern.sub(by, text)
    return text


def scrub_record(value: Any) -> Any:
    """Scrub all strings of a JSON value, including keys.

    The whole text is replaced if its field has the name of a secret or a host, or if the list item before it is an
    option with the name of a secret.
    """
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {scrub(str(name)): _scrub_field(str(name), item) for name, item in value.items()}
    if not isinstance(value, (list, tuple)) or _NUMBER_TYPES.issuperset(
        map(type, value)
    ):  # a shortcut for lists of samples
        return value
    options = [False, *(isinstance(item, str) and bool(_SECRET_OPTION.fullmatch(item)) for item in value)]
    return [
        "<secret>" if follows and isinstance(item, str) and not item.startswith("-") else scrub_record(item)
        for follows, item in zip(options, value, strict=False)
    ]


def _scrub_field(name: str, value: Any) -> Any:
    if not isinstance(value, str) or not value:
        return scrub_record(value)
    return _find_replacement(name) or scrub(value)


@functools.lru_cache(4096)  # all rows of a log have the same fields
def _find_replacement(name: str) -> str:
    return "<secret>" if _SECRET_FIELD.search(name) else "<private>" if _PRIVATE_FIELD.search(name) else ""


def _shorten_quoted_path(quoted: re.Match[str]) -> str:
    quote, option = quoted["quote"], quoted["option"] or ""
    return f"{quote}{option}{_shorten_path(quoted[0].strip(quote).removeprefix(option))}{quote}"


def _shorten_path(path: str) -> str:
    """Replace ``/a/b/c`` by ``<path>/c``, and a home folder such as ``/home/name`` by ``<path>/<user>``."""
    *folders, last = _SEPARATOR.split(path)
    is_of_user = bool(folders) and folders[-1].lower() in _USER_FOLDERS
    return f"<path>/{'<user>' if is_of_user else last}"


@functools.cache
def _find_private_names() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return patterns for the names of this host and its user, each with its replacement."""
    host = socket.gethostname()
    names = {host: "<host>", host.split(".")[0]: "<host>"}
    with contextlib.suppress(KeyError, OSError):  # the user ID has no account, as in some containers
        names[getpass.getuser()] = "<user>"
    return tuple(
        (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE), by)
        for name, by in names.items()
        if len(name) >= _MIN_NAME_LENGTH and not name.isdigit() and name.lower() not in _ANONYMOUS_NAMES | _COMMON_WORDS
    )
