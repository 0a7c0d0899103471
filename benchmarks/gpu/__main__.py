"""`python3 -m benchmarks.gpu right|fast|SECTION`: see the package's own description."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu import wheels
from benchmarks.gpu.bench import REPO
from benchmarks.gpu.document import Document
from benchmarks.gpu.runner import Outcome, run_sections
from benchmarks.gpu.sections import KITS, SECTIONS, START_S, Section

EXIT_FINDINGS = 1
EXIT_NO_GPU = 3


def main(argv: list[str]) -> int:
    began_s = time.monotonic()
    args = _parser().parse_args(argv)
    sections = _sections(args.what, args.only)
    num_gpus = count_gpus()
    if not num_gpus and not args.rehearse:
        print("no GPU: the CUDA driver finds none here. To try the kit on the CPU: --rehearse", file=sys.stderr)
        return EXIT_NO_GPU
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="outrider-gpu-site-") as site:
        unpacked = wheels.unpack(Path(site))
        before = [site] if unpacked else []
        sys.path[:0] = before
        given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        os.environ["PYTHONPATH"] = os.pathsep.join([*before, str(REPO), *given])
        if args.rehearse:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # small sizes gain nothing from more
        lacking = wheels.missing()
        for name in lacking:
            print(f"missing: {name}", flush=True)
        head = _head(args.rehearse, num_gpus, unpacked, lacking)
        document = Document(args.out, args.what, head, [Outcome(section) for section in sections])
        print(head, flush=True)
        return _run(document, args.rehearse, began_s)


def _run(document: Document, rehearse: bool, began_s: float) -> int:
    limit_s = START_S + sum(outcome.section.limit_s for outcome in document.outcomes)
    if rehearse:
        limit_s += START_S * len(document.outcomes)  # on two cores torch is imported between sections
    document.write()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or what was started and its models would stay
    try:
        run_sections(
            document.outcomes,
            rehearse=rehearse,
            write=document.write,
            say=lambda line: print(line, flush=True),
            deadline_s=began_s + limit_s,
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        names = f"{document.folder}/gpu-{document.name}.md and .json"
        print(f"{time.monotonic() - began_s:.0f} s of {limit_s}; written: {names}", flush=True)
    is_well = all(outcome.is_well for outcome in document.outcomes)
    return 0 if is_well else EXIT_FINDINGS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=_table())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", help="right, fast or the name of one section")
    parser.add_argument("--only", nargs="+", default=[], metavar="SECTION", help="these sections of the kit alone")
    out = os.environ.get("OUT") or ".work/gpu"
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for the two documents; $OUT by default")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at sizes whose figures say nothing")
    return parser


def _table() -> str:
    lines = []
    for name, sections in KITS.items():
        lines.append(f"{name}:")
        lines += [f"  {section.name:<10} {section.limit_s:4} s  {section.about}" for section in sections]
    return "\n".join(lines)


def _sections(what: str, only: list[str]) -> list[Section]:
    """Return what is to run. Ends this process for a name that no section has."""
    if what not in KITS and what not in SECTIONS:
        sys.exit(f"there is no kit and no section {what!r}; there are:\n{_table()}")
    sections = KITS[what] if what in KITS else [SECTIONS[what]]
    unknown = set(only) - {each.name for each in sections}
    if unknown:
        sys.exit(f"{what} has no section {', '.join(sorted(unknown))}; there are:\n{_table()}")
    return [each for each in sections if not only or each.name in only]


def count_gpus() -> int:
    """Return how many GPUs the CUDA driver finds. It is asked itself: torch takes seconds to import."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def _head(rehearse: bool, num_gpus: int, unpacked: list[str], lacking: list[str]) -> str:
    where = f"{num_gpus} GPU(s)" if not rehearse else "A REHEARSAL ON THE CPU: its figures say nothing"
    parts = [f"{where}; Python {sys.version.split()[0]}"]
    if unpacked:
        parts.append(f"unpacked {', '.join(unpacked)}")
    if lacking:
        parts.append(f"MISSING: {'; '.join(lacking)}")
    return "; ".join(parts) + "."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
