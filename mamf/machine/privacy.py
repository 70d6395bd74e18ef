"""Remove secrets, accounts, hosts, addresses and paths from all texts that mamf writes, because logs are published.

The code that writes logs and folders calls ``scrub_record`` for every record, so no other code has to call it. To make
mamf recognize the access tokens of another service, add their prefix to ``_TOKEN_PREFIXES``.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import re
import socket
from collections.abc import Sequence
from typing import Any

# Maximum length of a text in characters. Longer texts are cut, because searching them would take too long.
_MAX_TEXT_LENGTH = 10_000

# -- secrets -----------------------------------------------------------------------------------------------------------

# A regular expression for the prefixes of access tokens of known services. A text counts as a token only if at least
# eight more characters follow the prefix.
_TOKEN_PREFIXES = (
    r"gh[opsur]_|github_pat_|gl(?:pat|dt|rt|cbt|ptt|ft|soat|oas|agent|imt|ffct)-|AT[AC]TT3x|ATBB|sgp_|lin_api_|figd_|PMAK-"
    r"|hf_(?=[A-Za-z0-9]{16})|api_org_|sk-(?!learn)|[srp]k_(?:live|test)_|whsec_|nvapi-|r8_|gsk_|xai-|pplx-|tgp_v1_|csk-|jina_|tvly-|pcsk_"
    r"|lsv2_[ps][tk]_|rpa_|wandb_v1_|fo1_|FlyV1 |AKIA|ASIA|AROA|AIDA|ABSK|AIza|ya29\.|1//0|GOCSPX-|LTAI|AKID"
    r"|dapi(?=[0-9a-f])|xox[a-z]-|xoxe\.|xapp-|npm_|pypi-|rubygems_|SG\.|hv[sbr]\.|do[opr]_v1_|dckr_[op]at_|tskey-"
    r"|AGE-SECRET-KEY-|\d{8,10}:AA|eyJ(?=[\w-]*\.)|shp(?:at|ca|pa|ss)_|sntry[su]_|glsa_|glc_|dp\.[a-z]{2}\.|pscale_[a-z]+_"
    r"|pul-(?=[0-9a-f])|rdme_|sq0[a-z]{3}-|NRAK-|dt0c01\.|CFPAT-|HRKU-|sbp_|sb_secret_|nfp_|ntn_(?=\d)|secret_|ops_eyJ"
    r"|a[ks]-(?=[A-Za-z0-9]{22})|key-(?=[0-9a-f]{32})|ssh-[a-z0-9]+ AAAA|\$(?:2[aby]|[56])\$"
)
# If the name of an option, variable or field ends in one of these words, its value is secret. Names that end in one of
# _COUNTABLE_NAME_ENDINGS, such as "token", may also be counts, so mamf keeps their value if it is a number.
_COUNTABLE_NAME_ENDINGS = (
    r"token|(?:api|auth|access|secret|private|ssh|account|license|signing|encryption|master)key|[_-]key(?:[_-]?id)?"
)
_SECRET_NAME_ENDINGS = (
    rf"password|passwd|secret|{_COUNTABLE_NAME_ENDINGS}|(?<![a-z0-9])(?:pass_?phrase|pass_?code|passw|pwd|credentials?"
    r"|creds?|cookie|auth(?:orization)?|otp|dsn|sas|connection_?string|webhook(?:_?url)?)"
)
# Endings of the names of options, variables and fields whose values identify a user or a machine.
_PRIVATE_NAME_ENDINGS = (
    r"host_?name|host|fqdn|node_?(?:name|list)|user_?name|log_?name|user|login|e_?mail|account(?:_?(?:name|id))?"
    r"|master_?addr|home(?:_?dir)?|cwd|(?:rdzv_?)?endpoint|server(?:_?name)?|ip_?addr(?:ess)?|uuid|serial(?:_?(?:number|no))?|asset_?tag"
)
# The start of a command-line option: its dashes and the part of its name before one of the endings above.
_OPTION_START = r"(?<![\w-])--?[\w.-]{0,60}?"
# The value of an option or variable: a quoted text, or text up to the next blank or comma.
_OPTION_VALUE = r"(?![-<])(?:'[^']*'|\"[^\"]*\"|[^\s,;&'\"<>]+)+"
# A lookahead that fails before a number, because a number is a count and not a secret.
_NO_COUNT_LOOKAHEAD = r"(?![\d.,]+(?:e[+-]?\d+)?(?![\w.-]))"


def _make_secret_pattern(prefix: str, separator: str) -> str:
    """Make a regular expression that matches a prefix, the name of a secret, a separator and a value. If the name can
    also be the name of a count, such as "token", the value must not be a number.
    """
    return (
        rf"({prefix}(?:(?:{_COUNTABLE_NAME_ENDINGS}){separator}{_NO_COUNT_LOOKAHEAD}|(?!{_COUNTABLE_NAME_ENDINGS})(?:{_SECRET_NAME_ENDINGS}){separator}))"
        rf"{_OPTION_VALUE}"
    )


# -- hosts and addresses -----------------------------------------------------------------------------------------------

_HOST_LABEL = r"[a-z0-9][a-z0-9-]{0,62}"
_PRIVATE_DOMAINS = "local|localdomain|lan|internal|intra|corp|cluster|home|private"
_PUBLIC_DOMAINS = (
    "com|net|org|edu|gov|io|ai|cloud|dev|at|au|be|ca|ch|cn|cz|de|dk|es|eu|fi|fr|il|in|it|jp|kr|nl|no|pl"
    "|ru|se|sg|tw|uk|us"
)
# Sites whose URLs are kept, because they are public.
_PUBLIC_SITES = (
    r"(?:[\w-]+\.)*(?:github\.com|github\.io|githubusercontent\.com|huggingface\.co|pytorch\.org|nvidia\.com|amd\.com"
    r"|intel\.com|arxiv\.org|python\.org|pypi\.org|readthedocs\.io|wikipedia\.org|example\.(?:com|org))(?![\w.-]|:\d)"
)
_IPV4_NUMBER = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# Version numbers such as cuBLAS 12.1.3.1 look like IPv4 addresses. So if the first number is below 20, this pattern
# matches only if the first number is 10, or if a later number is too high for a version number. After a word such as
# "host", a rule in _ADDRESS_RULES replaces every IPv4 address.
_IPV4_ADDRESS = rf"(?:10|127|[2-9]\d|1\d\d|2[0-4]\d|25[0-5]|1?\d(?=[\d.]*\.[12]\d\d))(?:\.{_IPV4_NUMBER}){{3}}"
# Times, slices and C++ names contain colons too. So a short IPv6 address (with ``::``) matches only if its first group
# has four hexadecimal digits, as in the addresses of real networks.
_IPV6_GROUP = r"[0-9a-f]{1,4}"
_IPV6_GROUPS = rf"{_IPV6_GROUP}(?::{_IPV6_GROUP}){{0,6}}"
_IPV6_ADDRESS = (
    rf"(?:{_IPV6_GROUP}:){{7}}{_IPV6_GROUP}"
    rf"|(?=[23][0-9a-f]{{3}}:|f[cdef][0-9a-f]{{2}}:){_IPV6_GROUPS}::(?:{_IPV6_GROUPS})?"
)
_SERIAL_NUMBER_WORDS = r"serial(?:[ _-]?(?:number|num|no)\b\.?)?|s/n|sn(?=[:#=])|(?:service|asset)[ _-]?tag"
_CLUSTER_NODE_NAME = (
    r"(?:node|nid|login|worker|hpc|head-?node|gpu-?node|pod|slurm)-?(?:[a-z]{1,8}-?)?\d{1,6}(?:-\d{1,4})?"
)


def _compile_rules(*rules: tuple[str, str]) -> Sequence[tuple[re.Pattern[str], str]]:
    """Compile rules so that they ignore case. A rule is a regular expression and the text that replaces each match."""
    return [(re.compile(pattern, re.IGNORECASE), replacement) for pattern, replacement in rules]


_SECRET_RULES = _compile_rules(
    (r"-{5}BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-{5}[\w+/=\s\\-]*", "<secret>"),
    (rf"(?<![\w-])(?-i:{_TOKEN_PREFIXES})[\w.+/=~$-]{{8,}}(?: [\w@.-]+(?=$))?", "<secret>"),
    (r"https://(?:hooks\.slack|discord(?:app)?)\.com/\S+|https://[\w.-]*webhook\.office\.com/\S+", "<secret>"),
    (r"\b((?:bearer|basic|digest)\s+)(?=[\w.+/=-]*[\d=A-Z])[\w.+/=~-]{8,}", r"\1<secret>"),
    # Options and variables with their values: --wandb-key X, HF_TOKEN=X, "password": "X".
    (_make_secret_pattern(_OPTION_START, r"['\"]?(?:\s*=\s*|\s+)"), r"\1<secret>"),
    (
        rf"({_OPTION_START}(?:pass|pw)(?:\s*=\s*|\s+)){_OPTION_VALUE}|\b((?-i:[A-Z_]*_PASS)=){_OPTION_VALUE}",
        r"\1\2<secret>",
    ),
    (_make_secret_pattern(r"(?<![\w$])[\w.+-]{0,60}?", r"['\"]?\s?(?:=|:(?!//))\s?"), r"\1<secret>"),
    (r"\b((?:password|passwd|passphrase|passcode|pwd|secret|token)\s+(?:is|was)\s+)(?!<)[^\s,;]+", r"\1<secret>"),
    (r"\b((?:password|passwd|passphrase|passcode|pwd)\s+)(?!<|is\b|was\b)[^\s,;]+", r"\1<secret>"),
    (r"\b((?:sshpass|mysql\w*|docker login|redis-cli|htpasswd)\b[^|;&]{0,200}?\s-[pa]\s?)(?!<)\S+", r"\1<secret>"),
    (r"\b((?:curl|wget)\b[^|;&]{0,200}?\s-u\s?)(?!<)\S+", r"\1<secret>"),
    (r"\b((?:wandb|huggingface-cli|hf auth|comet) login\s+)(?![-<])\S+", r"\1<secret>"),
    (r"(?<![\w<./-])[0-9a-f]{32,}(?![\w.-])", "<secret>"),
)
_ADDRESS_RULES = _compile_rules(
    (rf"\b[a-z][a-z0-9+.]{{1,20}}://(?!{_PUBLIC_SITES})(?!<)\S+", "<address>"),
    (rf"\b[\w.+-]{{1,64}}@(?!\d){_HOST_LABEL}(?:\.{_HOST_LABEL}){{0,8}}(?::[\w~./-]+)?", "<user>@<host>"),
    (rf"({_OPTION_START}(?<![a-z0-9])(?:{_PRIVATE_NAME_ENDINGS})(?:=|\s+)){_OPTION_VALUE}", r"\1<private>"),
    (rf"\b((?:[a-z]+_)*(?:{_PRIVATE_NAME_ENDINGS})=){_OPTION_VALUE}", r"\1<private>"),
    (rf"(?<![/\w.-])(?:{_HOST_LABEL}\.){{1,8}}(?:{_PRIVATE_DOMAINS})\b(?![./(\w:-])", "<host>"),
    (rf"(?<![/\w.-])(?:{_HOST_LABEL}\.){{1,8}}(?:{_PRIVATE_DOMAINS})(?=[:/])", "<host>"),
    (rf"(?<![/\w.-])(?:{_HOST_LABEL}\.){{2,8}}(?:{_PUBLIC_DOMAINS})\b(?![.(\w-])", "<host>"),
    (r"\bip(?:-\d{1,3}){4}\b|\b[a-z][a-z0-9-]{0,62}\[\d+-\d+(?:,\d+(?:-\d+)?)*\]", "<host>"),
    (rf"(?<![\w./-]){_CLUSTER_NODE_NAME}(?![\w-])|\bdgx-[a-z0-9]+-\d{{1,4}}\b", "<host>"),
    (r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<uuid>"),
    (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<uuid>"),
    (rf"(?<![a-z])(?:{_SERIAL_NUMBER_WORDS})(?: is)?[\s:#=]{{1,40}}[\w-]*\d[\w-]*", "<serial number>"),
    (rf"(?<![\w:.])(?:{_IPV6_ADDRESS})(?!\w|:\w)|\b[0-9a-f]{{2}}(?:[:-][0-9a-f]{{2}}){{5}}\b", "<address>"),
    (
        rf"(?<![\w.]){_IPV4_ADDRESS}(?![\w.])"
        rf"|\b(?:ip|host|server|addr|address|ssh|ping|dns)[ :=]{{1,3}}{_IPV4_NUMBER}(?:\.{_IPV4_NUMBER}){{3}}(?![\w.])",
        "<address>",
    ),
    # The address of a device on the PCI bus, or an IPv4 address with a port.
    (r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b|\b\d{1,3}(?:\.\d{1,3}){3}\]?:\d+\b", "<address>"),
)
_SECRET_FIELD_PATTERN = re.compile(rf"(?i:(?:{_SECRET_NAME_ENDINGS})|^key|^pass)$|(?<=[a-z])Key$")
_PRIVATE_FIELD_PATTERN = re.compile(rf"(?:^|(?<!\bto)[_.-]|(?<=[a-z])(?=[A-Z]))(?i:{_PRIVATE_NAME_ENDINGS})$")
_SECRET_OPTION_PATTERN = re.compile(rf"{_OPTION_START}(?:{_SECRET_NAME_ENDINGS}|pass|pw)", re.IGNORECASE)

# -- paths -------------------------------------------------------------------------------------------------------------

# The beginning of an absolute path, or of a path that starts in the parent folder or a home folder.
_PATH_ROOT = r"(?:file://[\w.-]*|~(?:[A-Za-z_][\w.-]*)?|(?:\.[/\\])?\.\.|[A-Za-z]:)?(?:/|\\+)"
# One folder or file name in a path. It may contain blanks that are escaped by a backslash.
_PATH_PART = r"(?:\\ |[^\s/\\'\"`<>|:;,()\[\]{}])+"
# One word of a folder name that contains unescaped blanks.
_FOLDER_WORD = r"(?:\\ |\.(?!\w)|[^\s/\\.'\"`<>|:;,()\[\]{}])+"
# A lookahead for the next word of a folder name with blanks. It fails before an option, before a new path, and before a
# word such as "and", because there the path ends and the sentence around it continues.
_NO_NEW_PHRASE_LOOKAHEAD = r"(?![-~]|\.\.?[/\\]|(?:and|or|but|to|in|is|was|has|of|for|from|with|on|at|as|by|not)\b)"
_PATH_PATTERN = re.compile(
    rf"(?<![\w/\\.~>+-]){_PATH_ROOT}"
    rf"(?:(?:{_FOLDER_WORD} {_NO_NEW_PHRASE_LOOKAHEAD}){{0,3}}{_PATH_PART}[/\\]+)*{_PATH_PART}",
    re.IGNORECASE,
)
_QUOTED_PATH_PATTERN = re.compile(
    rf"(?P<quote>['\"])(?P<option>[^'\"/\\=\s]*=)?{_PATH_ROOT}[^'\"]*[^'\"/\\](?P=quote)", re.IGNORECASE
)
_PATH_SEPARATOR = re.compile(r"/|\\+(?! )")
# Minimum length of host and user names that mamf replaces. Shorter names are single letters, which occur in every text.
_MIN_PRIVATE_NAME_LENGTH = 2
# Names of hosts and users that are not replaced: they do not identify anyone, or they are two-letter words that are
# common in messages.
_HARMLESS_NAMES = frozenset(
    {
        *("root", "user", "localhost", "admin", "ubuntu", "runner"),
        *("am", "an", "as", "at", "be", "by", "do", "go", "he", "if", "in", "is", "it", "me", "my", "no", "of", "ok"),
        *("on", "or", "so", "to", "up", "us", "we", "gb", "hz", "kb", "mb", "ms", "ns", "tb", "mm", "nn", "nt", "tn"),
        "tt",
    }
)


@functools.lru_cache(4096)  # cached, because the rows of a log repeat the same texts
def scrub_text(text: str) -> str:
    """Replace secrets, accounts, hosts and addresses in a text by placeholders such as ``<secret>``, and shorten each
    path outside the working directory to its last part. Scrubbing the result again changes nothing.
    """
    if len(text) > _MAX_TEXT_LENGTH:
        text = f"{text[: _MAX_TEXT_LENGTH - 100].rpartition(' ')[0]} (cut)"
    for pattern, replacement in _SECRET_RULES:
        text = pattern.sub(replacement, text)
    if "/" in text or "\\" in text:  # Skip texts without a slash, which contain no path.
        text = _PATH_PATTERN.sub(
            lambda path: _shorten_path(path[0]), _QUOTED_PATH_PATTERN.sub(_shorten_quoted_path, text)
        )
    for pattern, replacement in (*_ADDRESS_RULES, *_compile_private_name_rules()):
        text = pattern.sub(replacement, text)
    return text


def scrub_record(value: Any) -> Any:
    """Return a JSON value with all its strings scrubbed (private texts replaced by placeholders), including dictionary
    keys.

    If the name of a field says that the field contains a secret or a host, the field's whole text is replaced. If an
    item of a list is an option for a secret, such as ``--token`` in a command line, the next item is replaced.
    """
    if isinstance(value, str):
        return scrub_text(value)
    if isinstance(value, dict):
        return {
            scrub_text(str(name)): (_find_field_replacement(str(name)) if item and isinstance(item, str) else "")
            or scrub_record(item)
            for name, item in value.items()
        }
    # Skip lists of samples, because they are long and contain only numbers.
    if not isinstance(value, (list, tuple)) or set(map(type, value)) <= {int, float}:
        return value
    are_secret = [False, *(isinstance(item, str) and bool(_SECRET_OPTION_PATTERN.fullmatch(item)) for item in value)]
    return [
        "<secret>" if is_secret_value and isinstance(item, str) and not item.startswith("-") else scrub_record(item)
        for is_secret_value, item in zip(are_secret, value, strict=False)
    ]


@functools.lru_cache(4096)  # cached, because the rows of a log have the same fields
def _find_field_replacement(name: str) -> str:
    return (
        "<secret>" if _SECRET_FIELD_PATTERN.search(name) else "<private>" if _PRIVATE_FIELD_PATTERN.search(name) else ""
    )


def _shorten_quoted_path(quoted: re.Match[str]) -> str:
    quote, option = quoted["quote"], quoted["option"] or ""
    return f"{quote}{option}{_shorten_path(quoted[0].strip(quote).removeprefix(option))}{quote}"


def _shorten_path(path: str) -> str:
    """Shorten a path outside the working directory: ``/a/b/c`` to ``<path>/c``, and a home folder such as
    ``/home/name`` to ``<path>/<user>``.
    """
    *folders, last_part = _PATH_SEPARATOR.split(path)
    return f"<path>/{'<user>' if folders and folders[-1].lower() in ('home', 'users') else last_part}"


@functools.cache
def _compile_private_name_rules() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return rules that replace the names of this host and of this process's user. A rule is a regular expression and
    its replacement.
    """
    host = socket.gethostname()
    names = {host: "<host>", host.split(".")[0]: "<host>"}
    with contextlib.suppress(KeyError, OSError):  # in some containers the user ID has no account
        names[getpass.getuser()] = "<user>"
    return tuple(
        (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE), replacement)
        for name, replacement in names.items()
        if len(name) >= _MIN_PRIVATE_NAME_LENGTH and not name.isdigit() and name.lower() not in _HARMLESS_NAMES
    )
