"""Made-up secrets and names, each in a log that ``results check`` must reject and ``results submit`` must clean.

No line holds one whole, and none of them is real, so that scanners of this repository find nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from attacks.calls import call
from attacks.counts import Counts
from mamf.contribution.privacy import private_findings, without_private

_WORD = "Zq7" + "x9Kd2Lm4" * 5


def _all(*texts: str) -> list[str]:
    return [text.replace("~", "") for text in texts]


#: Texts with what must go; ``~`` splits what a scanner would know.
TEXTS = {
    "key": _all(
        f"g~hp_{_WORD[:36]}",
        f"g~ho_{_WORD[:36]}",
        f"github~_pat_{_WORD[:22]}_{_WORD}",
        f"glp~at-{_WORD[:20]}",
        f"h~f_{_WORD[:34]}",
        f"s~k-{_WORD[:40]}",
        f"s~k-proj-{_WORD[:40]}",
        f"s~k-ant-api03-{_WORD[:40]}",
        f"s~k_live_{_WORD[:24]}",
        "AK~IA" + "IOSFODNN7EXAMPLE",
        "AS~IA" + "Y34FZKBOKMUTVV7A",
        f"AI~za{_WORD[:35]}",
        f"ya~29.{_WORD[:40]}",
        f"xo~xb-1234567890-{_WORD[:24]}",
        f"n~pm_{_WORD[:36]}",
        f"py~pi-AgEIcHlwaS5vcmc{_WORD}",
        f"nv~api-{_WORD}",
        f"S~G.{_WORD[:22]}.{_WORD}",
        f"hv~s.{_WORD[:24]}",
        f"ey~JhbGciOiJIUzI1NiJ9.{'ey'}JzdWIiOiIxMjM0In0.{_WORD}",
        f"1234567890:A~A{_WORD[:33]}",
        f"https://hooks.slack~.com/services/T00000000/B00000000/{_WORD[:24]}",
        f"-----BEGIN RSA PRIVATE ~KEY-----\n{_WORD}\n-----END RSA PRIVATE ~KEY-----",
        f"ssh-~ed25519 AAAA{_WORD} jane",
    ),
    "named": _all(
        f"HF_TO~KEN={_WORD[:10]}",
        f"WANDB_API~_KEY={_WORD[:40]}",
        f"AWS_SECRET_ACCESS~_KEY={_WORD[:40]}",
        "PGPASS~WORD=correcthorse",
        "MYSQL~_PWD=correcthorse",
        "mamf find --pass~word correcthorse -m x",
        "mamf find --pass~word=correcthorse",
        f"curl --api-k~ey {_WORD[:20]}",
        f"run --to~ken {_WORD[:20]}",
        "pass~word: correcthorse",
        "the pass~word is correcthorse",
        f'"client_sec~ret": "{_WORD[:20]}"',
        f"Authorization: Bear~er {_WORD[:30]}",
    ),
    "account": _all(
        "USER=jdoe",
        "LOGNAME=jdoe",
        "SLURM_JOB_USER=jdoe",
        "SLURM_NODELIST=gpu-b12",
        "SLURM_JOB_NODELIST=gpu-[001-004]",
        "SLURMD_NODENAME=gpu-b12",
        "HOSTNAME=gpu-b12",
        "MASTER_ADDR=gpu-b12",
        "ran on gpu-node-[01-04,07]",
        "ran on ip-10-0-3-17",
        "ask jane.doe+gpu@lab.example.org",
    ),
    "address": _all(
        "00-1b-44-11-3a-b7",
        "00:1b:44:11:3a:b7",
        "203.0.113.17",
        "8.8.4.114",
        "ping 8.8.8.8",
        "ssh 13.52.4.1",
        "2001:db8::8a2e:370:7334",
        "s3://jane-bucket/logs/run.jsonl",
        "gs://jane-bucket/run",
        "hdfs://name1/user/jane",
        "git@github.com:jdoe/private.git",
        "git+ssh://jdoe@git.example.org/x.git",
        "https://jdoe:hunter2@example.org/x",
        "https://jdoe@dev.example.org/x",
        "postgres://jdoe:hunter2@db/x",
    ),
    "serial": _all(
        "Serial Number                   : 1650223012345",
        "Board Serial: 1322621047031",
        "board_serial=1322621047031",
        "Chassis Serial Number: J117X2B",
        "S/N 1650223012345",
        "Service Tag: 7XK2JQ2",
        "asset tag A-00172",
    ),
}
#: Names of fields whose values must go, whatever they are.
NAMES = ["TOKEN", "HF_TOKEN", "KEY", "API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PASSWORD", "PGPASSWORD"]
NAMES += ["USER", "SLURM_JOB_USER", "LOGNAME", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "HOSTNAME", "NODENAME"]
NAMES += ["apiKey", "access_token", "client_secret", "MASTER_ADDR", "uuid", "board_serial", "serialNumber", "home"]
_PLACES = ("notes", "command", "remarks", "variables")


def attack(logs: dict[str, Path], folder: Path, random: Random, count: int) -> Counts:
    """Each secret in turn, in a field of an honest log that is drawn."""
    counts = Counts("secrets")
    known = [(kind, text) for kind, texts in TEXTS.items() for text in texts] + [("field", name) for name in NAMES]
    path = folder / "private.jsonl"
    for number in range(count):
        kind, text = known[number % len(known)]
        name = random.choice([name for name in logs if name != "imported"])
        header, *lines = logs[name].read_text().splitlines()
        record = _with(json.loads(header), kind, text, random)
        path.write_text("\n".join((json.dumps(record), *lines)) + "\n")
        counts.of["inputs"] += 1
        found, clean = list(private_findings(1, record)), json.dumps(without_private(record))
        if not found or (kind != "field" and _core(text) in clean):
            counts.fault("other", name, f"{kind} {number % len(known)} is not found")
        if list(private_findings(1, json.loads(clean))):
            counts.fault("other", name, f"{kind} {number % len(known)} is found again after it was removed")
        if number % 10 == 0:
            ended = call(["results", "submit", str(path), "--dry-run", "--results", str(folder)], counts)
            if kind != "field" and _core(text) in ended.out + ended.err:
                counts.fault("other", name, f"submit prints {kind} {number % len(known)}")
    return counts


def _core(text: str) -> str:
    """What must not be left of a secret: its longest word, with digits if there is one."""
    words = text.replace("=", " ").split()
    return json.dumps(max(words, key=lambda word: (bool(set(word) & set("0123456789")), len(word))))[1:-1]


def _with(record: dict[str, object], kind: str, text: str, random: Random) -> dict[str, object]:
    if kind == "field":
        return record | {"environment": {"variables": {text: "hunter2"}}}
    place = random.choice(_PLACES)
    return record | {place: {"A": text} if place == "variables" else [text] if place == "remarks" else f"see {text} ,x"}
