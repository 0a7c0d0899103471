"""Models, prompts, a description of the machine and result files, shared by the benchmarks.

Nobody edits a file under `benchmarks/results/`: it holds what a command printed, with that command, the machine and the
date in it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import safe_open
from scipy.stats import t

from benchmarks.tables import markdown_table

REPO = Path(__file__).resolve().parent.parent
WORK = REPO / ".work"
RESULTS = REPO / "benchmarks" / "results"
DEMO_TARGET, DEMO_DRAFT = REPO / "models/demo/target", REPO / "models/demo/draft"

SIZES = {
    "94M": (1024, 2816, 16, 4, 2),
    "111M": (1024, 3488, 16, 4, 2),
    "375M": (2048, 5632, 32, 8, 2),
    "1b": (2048, 8192, 32, 8, 10),
}
"""Sizes of the widened demo target, by the name on the command line: fields of `outrider.lab.models.widening.Sizes`."""


def widened(size: str, dtype: str = "float32") -> Path:
    """Return the demo target at that size, made when it is missing: its logits at the cost of a larger model."""
    import torch

    from outrider.lab.models.widening import WidenedSizes, widen_folder

    name = size if dtype == "float32" else f"{size}-{dtype}"
    folder = WORK / f"widened-{name}"
    if not (folder / "config.json").exists():
        print(widen_folder(DEMO_TARGET, folder, WidenedSizes(*SIZES[size]), getattr(torch, dtype)), flush=True)
    return folder


REPETITIVE, HELD_OUT, QUESTIONS = "repetitive", "held-out", "questions"
SETS = {
    QUESTIONS: REPO / "benchmarks" / "prompts" / "questions.jsonl",
    REPETITIVE: REPO / "benchmarks" / "prompts" / "repetitive.jsonl",
    HELD_OUT: REPO / "tests" / "data" / "prompts.jsonl",
}


@dataclass(frozen=True)
class Prompt:
    kind: str
    """code, json, question, prose or chat."""
    text: str


def read_prompts(name: str) -> list[Prompt]:
    """Return all prompts of a set, in the order of its file."""
    lines = [json.loads(line) for line in SETS[name].read_text(encoding="utf-8").splitlines()]
    return [Prompt(str(line["category"]), str(line["prompt"])) for line in lines]


def dev_prompts(count: int) -> list[str]:
    """Return the first `count` development prompts, from the first again when there are fewer."""
    prompts = read_prompts(HELD_OUT)
    return [prompts[index % len(prompts)].text for index in range(count)]


_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
"""Of a processor, of those that the report names."""


@dataclass(frozen=True)
class Option:
    """An option of a benchmark: its default, with what its help says and the values that it takes."""

    default: Any
    help: str | None = None
    choices: Sequence[str] | None = None


SIZE = Option("94M", "of the widened target", tuple(SIZES))
DTYPE = Option("float32", "of all models", ("float32", "bfloat16"))


def parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's options and of `--results`.

    options: an `Option` or its default. A list takes several values; True is turned off by `--no-NAME`.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in options.items():
        option = value if isinstance(value, Option) else Option(value)
        flag = f"--{name.replace('_', '-')}"
        if isinstance(option.default, bool):
            made.add_argument(flag, action=argparse.BooleanOptionalAction, default=option.default, help=option.help)
            continue
        several = isinstance(option.default, list)
        one = option.default
        if several:
            one = option.default[0] if option.default else ""
        made.add_argument(
            flag,
            type=type(one),
            nargs="+" if several else None,
            default=option.default,
            choices=option.choices,
            help=option.help,
        )
    made.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    return made


def num_parameters(folder: Path) -> int:
    """Return the number of parameters, from the headers of the folder's safetensors files."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def machine() -> dict[str, str]:
    """Describe the machine, its load, the software and the commit, for comparing results."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": f"{names[0] if names else platform.processor()} ({', '.join(flag for flag in _FLAGS if flag in flags)})",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_bytes / 2**30:.1f} GiB",
        "load at start": f"{os.getloadavg()[0]:.2f}",
        "software": f"Python {platform.python_version()}, {platform.system()} {platform.release()}, torch "
        f"{version('torch')}, transformers {version('transformers')}",
        "commit": source_commit(),
    }


def source_commit() -> str:
    """Return the commit of this checkout, and whether it was changed."""
    if not (REPO / ".git").exists():  # a repository further up is somebody else's
        return "unknown"
    commit, changes = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", "-uno")
    return f"{commit} and changes" if changes else commit


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=REPO, check=False, stdout=subprocess.PIPE, text=True).stdout.strip()


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the median, and the range when there is one."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % interval by Student's t; one value alone has no width."""
    mean, num = statistics.fmean(values), len(values)
    half = float(t.ppf(0.975, num - 1)) * statistics.stdev(values) / num**0.5 if num > 1 else 0.0
    return mean, mean - half, mean + half


@dataclass
class Report:
    """Sections of a result file, printed as they come."""

    name: str
    """Name of the files: `<name>-<date>.md` and `.json`."""
    title: str
    data: dict[str, Any] = field(default_factory=dict)
    """Content of the JSON file beside the command, the machine and the date."""
    _parts: list[str] = field(default_factory=list)
    _started: datetime = field(default_factory=lambda: datetime.now(UTC))
    _machine: dict[str, str] = field(default_factory=machine)

    def text(self, paragraph: str) -> None:
        print(f"\n{paragraph}", flush=True)
        self._parts.append(paragraph)

    def table(self, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.text(f"## {heading}\n\n{markdown_table(columns, rows)}")

    def verdict(self, violations: Sequence[str], well: str = "No violation.") -> None:
        """Add what was to hold and did not, or else `well`."""
        self.text("## Violations\n\n" + "\n".join(f"- {each}" for each in violations) if violations else well)
        self.data["violations"] = list(violations)

    def write(self, folder: Path = RESULTS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"command": command_line(), "date": self._started.strftime("%Y-%m-%d %H:%M UTC"), **self._machine}
        facts["took"] = f"{(datetime.now(UTC) - self._started).total_seconds() / 60:.1f} minutes"
        head = [f"# {self.title}", "Generated; not to be edited."]
        head.append(
            "\n".join(f"- {key}: {f'`{value}`' if key == 'command' else value}" for key, value in facts.items())
        )
        stem = folder / f"{self.name}-{self._started:%Y-%m-%d}"
        stem.with_suffix(".md").write_text("\n\n".join([*head, *self._parts]) + "\n", encoding="utf-8")
        lines = (f"{json.dumps(key)}: {json.dumps(_short(value))}" for key, value in (facts | self.data).items())
        stem.with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(f"\nwritten: {stem.relative_to(REPO) if folder == RESULTS else stem}.md and .json", flush=True)


def _short(value: Any) -> Any:
    """Return the value with numbers cut to six digits, all that a clock is good for, and unknown types as text."""
    if isinstance(value, dict):
        return {str(key): _short(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value if value is None or isinstance(value, (str, int)) else str(value)


def command_line() -> str:
    """Return the command as the user may enter it again: `python -m benchmarks.x ...`."""
    script = Path(sys.argv[0])
    module = script.relative_to(REPO).with_suffix("") if script.is_relative_to(REPO) else script
    name = str(module).replace("/", ".").removesuffix(".__main__")
    return shlex.join(["python", "-m", name, *sys.argv[1:]])
