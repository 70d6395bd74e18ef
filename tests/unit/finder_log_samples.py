"""Provide short sample logs of mamf-finder, versions 2 to 4. Their hosts, users and paths are invented."""

from __future__ import annotations

HOST = "blade-077.lab.example.org"
USER = "grace_h"
UUID = "0f3a5c1e-1111-2222-3333-4455667788aa"
PRIVATE = (HOST, "blade-077", USER, UUID, "/home", "/opt", "C:\\")

CUDA_PROPERTIES = (
    "_CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9, minor=0, total_memory=81079MB, "
    f"multi_processor_count=132, uuid={UUID}, pci_bus_id=7, pci_device_id=6, pci_domain_id=0, L2_cache_size=50MB)"
)
DASHES = "-" * 80
RANGE_ARGUMENTS = "--m_range 0 769 256 --n 1024 --k 4096"


def head(
    arguments: str = RANGE_ARGUMENTS,
    dtype: str = "torch.bfloat16",
    bullet: str = "",
    notes: str = "",
) -> str:
    """Return the head of a log.

    - ``bullet``: "- " for the newer format, which has bullets and lists environment variables; empty for the older one.
    """
    variables = "** Critical environment variables:\n- PYTORCH_TUNABLEOP_ENABLED=1\n\n" if bullet else ""
    return f"""
Benchmark started on 2025-01-04 16:01:02

** Command line:
/home/{USER}/venv/bin/python ./mamf-finder.py {arguments} --output_file=/opt/{USER}/out/mm.txt

** Dtype: {dtype}

** Platform/Device info:
{bullet}Linux {HOST} 5.15.0-113-generic #123-Ubuntu SMP Mon Jun 10 08:16:17 UTC 2024 x86_64 x86_64
{bullet}{CUDA_PROPERTIES}

** Critical software versions:
{bullet}torch=2.5.1+cu124
{bullet}cuda=12.4

{variables}** Additional notes:
{notes}

{DASHES}


"""


V2_NOTES = f"benchmark version: 2\nnode of {USER}, see /opt/{USER}/readme, GPU-{UUID}"
BULLET_NOTES = f"- {V2_NOTES}"
WARM_UP = "Warming up the accelerator for 30 secs ... accelerator warmup finished\n"

# M, N and K differ, so that a test notices if the parser takes another dimension for K.
FIRST, SECOND, THIRD = "256x1024x4096", "512x1024x4096", "768x1024x4096"

ROWS = ((1, 100.0, FIRST), (2, 300.5, SECOND), (3, 200.0, THIRD))


def format_v2_row(number: int, mean: float, shape: str, best: float, order: str = "mean median max") -> str:
    """Return a row of version 2. In the row and in the best figures, the median is 1 TFLOPS above the mean, and the
    maximum is 10 TFLOPS above the mean.
    """
    figures = {"mean": 0.0, "median": 1.0, "max": 10.0}
    row = " ".join(f"{mean + figures[name]:6.1f}({name})" for name in order.split())
    best_figures = " ".join(f"{best + figures[name]:6.1f}({name})" for name in order.split())
    return f"{number:>6} | {row} @ {shape:<20} | best: {best_figures} TFLOPS"


def v2(
    order: str = "mean median max",
    label: str = "MxNxK",
    means: str = "",
    legend: bool = False,
    header: str = "",
    tried: str = "Tried  3",
) -> str:
    best = 0.0
    lines = []
    for number, mean, shape in ROWS:
        best = max(best, mean)
        lines.append(format_v2_row(number, mean, shape, best, order))
    figures = {"mean": 300.5, "median": 301.5, "max": 310.5}
    summary = "\n".join(f"{name + ':':<8}{figures[name]:.1f} TFLOPS @ {SECOND} ({label})" for name in order.split())
    legend_line = "Legend: TFLOPS = 10**12 FLOPS\n" if legend else ""
    return (
        (header or head(notes=V2_NOTES))
        + WARM_UP
        + "\n".join(lines)
        + f"\n\n\n{tried} shapes => the best outcomes were:\n{summary}\n{means}\n{legend_line}Elapsed time: 0:00:39\n"
    )


GEOMEAN = "\ngeomean: 181.8 TFLOPS for 3 shapes in range: m=[0, 769, 256] | n=[1024] | k=[4096]\n"
BOTH_MEANS = (
    "\nAcross 3 shapes in range: m=[0, 769, 256] | n=[1024] | k=[4096] in this run:\n"
    "arithmetic mean: 200.2 TFLOPS\ngeometric mean:  181.8 TFLOPS\n"
)
BULLET_HEAD = head(bullet="- ", notes=BULLET_NOTES)

V2A = v2(order="max median mean")
V2B = v2(order="max median mean", label="MxKxN")
V2C = v2()
V2D = v2(means=GEOMEAN)
V2G = v2(means=BOTH_MEANS, legend=True, header=BULLET_HEAD, tried="Tried 3")

WARMUP_INTERRUPTED = (
    BULLET_HEAD
    + "Warming up the accelerator for 30 secs ... ^C\n\n"
    + "Tried 0 shapes => the best outcomes were:\n"
    + "mean:   0.0 TFLOPS @ \nmedian: 0.0 TFLOPS @ \nmax:    0.0 TFLOPS @ \n\n"
    + "Across 0 shapes in range: m=[0, 769, 256] | n=[1024] | k=[4096] in this run:\n"
    + "arithmetic mean: nan TFLOPS\ngeometric mean:  nan TFLOPS\n\n"
    + "Legend: TFLOPS = 10**12 FLOPS\nElapsed time: 0:00:12\n"
)

# A log that a user copied from a terminal into an issue. The output of a wrapper script surrounds it, messages of
# libraries interrupt it, and Markdown escapes changed it.
DAMAGED = f"""$ ./run_all.sh
=== device 0 ===
```
\\*\\* Dtype: torch.float16

\\*\\* Platform/Device info:
Linux {HOST} 5.15.0-113-generic #123-Ubuntu SMP x86_64 x86_64
\\_CudaDeviceProperties(name='AMD Instinct MI300X', major=9, minor=4, total_memory=196592MB)

\\*\\* Critical software versions:
torch=2.5.1+rocm6.2
hip=6.2.41133-dd7f95766, cuda=None

\\*\\* Additional notes:
benchmark version: 2


{DASHES}

Warming up the accelerator for 30 secs ... /home/{USER}/venv/lib/torch/mm.py:12: UserWarning: hipBLASLt on gfx942
rocblaslt info: HIPBLASLT_TENSILE_LIBPATH not set
accelerator warmup finished{format_v2_row(1, 100.0, FIRST, 100.0)}PS
{format_v2_row(3, 200.0, THIRD, 300.5)}
^C^CTried  3 shapes => the best outcomes were:
mean:   300.5TFLOPS @ {SECOND} (MxNxK)
median: 301.5 TFLOPSPS @ {SECOND} (MxNxK)
max:    5.0 TFLOPS @ {SECOND} (MxNxK)

geomean: 181.8 TFLOPS for 3 shapes in range: m=[0, 769, 256] | n=[1024] | k=[4096]
Legend: TFLOPS = 10**12 FLOPS
Elapsed time: 2 days, 14:42:00
```
"""

STAGED_NOTES = "- benchmark version: {}\n\n- search mode: {}"

V3_DEV = f"""{head("--search auto", bullet="- ", notes=STAGED_NOTES.format(8, "auto"))}
telemetry: nvml (power/clock sampling on)
Warming up (adaptive: until matmul throughput plateaus) ...
[auto] CUs=132 tile=128x256 dtype=bfloat16 elem=2B base=256 max_size=20480
     1 |    wave  472.2(mean)  474.8(median)  490.8(max) @ 2816x1536x1024       | best:  472.2(mean)  474.8(median)  \
490.8(max) TFLOPS |  685W 1905MHz
     2 |   plane  829.5(mean)  830.1(median)  835.6(max) @ 8192x8448x20480      | best:  829.5(mean)  830.1(median)  \
835.6(max) TFLOPS |  401W 1905MHz SUSPECT
[auto] wave: 60 (M,N) @ K=[1024, 8192] -> 2 scouts
[confirm] MSMF (sustainable) confirm: 2 shapes, 100 iters x 5 reps, trimmed-median of per-shape-warmed means ...
[confirm] MSMF 8192x8448x20480: trimmed-median-of-5 mean=728.1 TFLOPS  697W  spread=0.8%  (runs: 726.0, 728.1)
[confirm] MSMF ignored 2816x1536x1024 (795.5 TFLOPS @ 1710MHz vs 1361MHz saturated): still boosting, not sustainable

[confirm] MSMF lock-in: re-measuring 8192x8448x20480 x9 ...
[confirm] MSMF lock-in: 724.9 TFLOPS  spread=2.8%  1358MHz  (best available; still jittery)  (runs: 731.6, 711.4)
[confirm] WARNING: MSMF headline is a best-available fallback (not lock-in clean).

[confirm] MAMF (achievable) confirm: 2 shapes (boost≈1965MHz, need ≥1906MHz), 20 iters x 5 reps, 250ms idle ...
[confirm] MAMF 2816x1536x1024: peak=800.0 TFLOPS  313W 1980MHz  (top peaks: 800.0, 796.7)
[confirm] MAMF 8192x8448x20480: peak=700.0 TFLOPS  313W 1400MHz (base-clock, not boost)  (top peaks: 700.0, 696.7)


Tried 2 shapes => the best outcomes were:
MAMF (max achievable,  boost burst): 800.0 TFLOPS @ 2816x1536x1024 (MxNxK)  313W 1980MHz
MSMF (max sustainable, saturated):   724.9 TFLOPS @ 8192x8448x20480 (MxNxK)  699W 1358MHz

Across 2 shapes in range: auto-search (CUs=132, dtype=bfloat16, max_size=20480) in this run:
arithmetic mean: 724.4 TFLOPS
geometric mean:  721.5 TFLOPS

Legend: TFLOPS = 10**12 FLOPS
Elapsed time: 1 day, 10:40:32
"""

_GRID = """Warming up (adaptive: until matmul throughput plateaus) ...

Grid search: sweeping 2 shapes (scout 20 iters / 8 warmup), then confirm ...
     #  MxNxK                mean median    max   best     W   MHz
     1  3072x2816x8192      815.7  815.3  822.4  815.7   506  1980
     2  3072x2816x20480     828.4  828.6  831.6  828.4   510  1965
     2  3072x2816x20480     828.4  828.6  831.6  828.4   510  1965  <- best mean
"""
_SCREEN = """
Confirming the best candidates (MSMF, then MAMF) ...

MAMF recall screen: 2 shapes ...
  2 iters, 50ms idle
     #  MxNxK                peak   MHz
     1  3072x2816x20480     837.7  1965
     k  3072x2816x30720     830.0     -
     1  3072x2816x20480     837.7  1965  <- best peak
"""
_MSMF_V3 = """
MSMF (sustainable) confirm: 2 shapes ...
  MxNxK              TFLOPS     W   MHz spread  runs
  3072x2816x8192      743.0   679  1792   1.6%  749.6 743.2 740.4
  3072x2816x8192      743.0   679  1792   1.6%  749.6 743.2 740.4  <- MSMF
"""
_MSMF_V4 = """
MSMF (sustainable) confirm: 2 shapes ...
  rank: 1.0s each; top 10: 1.0s warm + 2.0s timed; lock-in 4.0s
  MxNxK              TFLOPS     W   MHz   C
  3072x2816x20480     730.0   681  1605  61 drop   0.1% spread  0.2%  rank
  3072x2816x20480     727.0   690  1590  62 drop   1.7% spread  4.2%  not steady
  3072x2816x8192      723.5     -     -   - drop  -0.1% spread  4.0%
  3072x2816x8192      722.5   681  1612  63 drop   0.7% spread  4.2%  locked in
  3072x2816x8192      722.5   681  1612  63 drop   0.7% spread  4.2%  locked in  <- MSMF
"""
_MAMF = """
MAMF (achievable) confirm: 2 shapes ...
  MxNxK              TFLOPS     W   MHz  top peaks
  3072x2816x8192      810.1   172  1500  811.0 810.1 809.8  base-clock, not boost
  3072x2816x20480     842.3   172  1980  842.8 842.3 841.9
  boost reference: 1980MHz (highest clock seen this run), need ≥1921MHz
  3072x2816x20480     842.3   172  1980  842.8 842.3 841.9  <- MAMF

Same-shape cross-check (each headline shape in both regimes):
  shape                   MAMF (boost)                      MSMF (saturated)                  MSMF/MAMF
  3072x2816x20480         842.3 172W 1980MHz                727.0 690W 1590MHz                86%  (MAMF*)
"""


def _format_results(outcomes: str) -> str:
    return f"""
{DASHES}

** Results:

Tried 2 shapes => the best outcomes were:
{outcomes}
Across 2 shapes in range: exact shapes from /opt/{USER}/shapes.txt (2 shapes) in this run:
arithmetic mean: 800.1 TFLOPS
geometric mean:  799.9 TFLOPS

Legend: TFLOPS = 10**12 FLOPS
Elapsed time: 0:01:01
"""


_SCOUT_OUTCOMES = """mean:   828.4 TFLOPS @ 3072x2816x20480 (MxNxK)
median: 828.6 TFLOPS @ 3072x2816x20480 (MxNxK)
max:    831.6 TFLOPS @ 3072x2816x20480 (MxNxK)
"""
_IDLE_SIBLINGS_NOTE = """note: 1 same-board sibling GPU(s) sat idle during the MSMF measurement, so MSMF reads high.
      Share of the time each was idle: GPU1 100%
      With all siblings idle it is a single-GPU upper bound; for full-node MSMF use mamf-finder-all-gpus.py.
"""


def _format_staged_head(version: int, dtype: str = "bfloat16") -> str:
    header = head("--m 3072 --n 2816 --k 8192 20480", dtype, bullet="- ", notes=STAGED_NOTES.format(version, "grid"))
    return header.rstrip() + "\n"


V3 = (
    _format_staged_head(3)
    + _GRID
    + _SCREEN
    + _MSMF_V3
    + _MAMF
    + _format_results(
        "MAMF (max achievable,  boost burst): 842 TFLOPS @ 3072x2816x20480 (MxNxK)  172W 1980MHz\n"
        "MSMF (max sustainable, saturated):   743 TFLOPS @ 3072x2816x8192 (MxNxK)  679W 1792MHz\n"
    )
)
V4 = (
    _format_staged_head(4, "mxfp8")
    + _GRID
    + _SCREEN
    + _MSMF_V4
    + _MAMF
    + "WARNING: no SM clock readings, so MAMF 842 TFLOPS is not boost-clock validated\n"
    + _format_results(
        "MAMF (max achievable,  boost burst): 842 TFLOPS @ 3072x2816x20480 (MxNxK)  172W 1980MHz\n"
        "MSMF (max sustainable, saturated):   722 TFLOPS @ 3072x2816x8192 (MxNxK)  681W 1612MHz 63C\n"
        + _IDLE_SIBLINGS_NOTE
    )
)
V4_INTERRUPTED = _format_staged_head(4) + _GRID + _SCREEN + "^C" + _format_results(_SCOUT_OUTCOMES)

V4_NODE = f"""
{DASHES}

** Node results (3 GPUs, each measured while all the others ran a continuous matmul):

  GPU     MAMF  MxNxK                  MSMF  MxNxK                 W   MHz   C  sibling idle
    0      852  3072x2816x20480         745  1536x2816x6144      700  1850  63    0%
    1      848  3072x2816x20480         755  1536x2816x6144      699     -   -   12%
    2      n/a                          741  1536x2816x6144      698  1838  64    0%

MAMF (node = median GPU):  850 TFLOPS @ 3072x2816x20480 (GPU0's shape)
MAMF slowest / spread:     848 TFLOPS (GPU1) / 0.5% across 2 GPUs
MSMF (node = median GPU):  745 TFLOPS @ 1536x2816x6144 (GPU0's shape)
MSMF slowest / spread:     741 TFLOPS (GPU2) / 1.9% across 3 GPUs

warning: GPU(s) 1 saw idle siblings during their MSMF measurement - the matmul on a sibling
         must have stopped; see the note in their logs
"""

ALL = {
    "v2a": V2A,
    "v2b": V2B,
    "v2c": V2C,
    "v2d": V2D,
    "v2g": V2G,
    "v3-dev": V3_DEV,
    "v3": V3,
    "v4": V4,
    "v4-node": V4_NODE,
}
