"""Train a draft head or a draft model for a target: the process that `outrider train-head` starts.

    python -m outrider.training.train_head

It reads one line of JSON on stdin, a `TrainingTask`, and writes lines on stdout: {"event": "progress", "stage", "text",
"done", "total"}, and at the end {"event": "trained", "report"}, {"event": "stopped"} or {"event": "failed", "message"}.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine.heads.checkpoint import TargetFiles
from outrider.engine.loading.loader import resolve_device
from outrider.training.chats import prompt_ids
from outrider.training.eagle3_student import Eagle3, ProjectedHead
from outrider.training.estimate import describe
from outrider.training.measure import measure_acceptance
from outrider.training.medusa_student import Medusa
from outrider.training.pass_embeddings import LookaheadEmbeddings
from outrider.training.run import Progress, TrainingPlan, TrainingRun, peak_bytes
from outrider.training.student import Draft, Student
from outrider.training.task import REPORT, TrainingTask, check_folders, estimate_sizes
from outrider.training.teacher import Teacher
from outrider.training.written import Answer, GenerationTask, Ids, digest_of_model, generate
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.processes.processes import write_event
from outrider.wire.processes.stop_flag import StopFlag, StopRequested

SHARED_CHARS = 50
"""Length in characters of a substring that a training prompt may not share with a prompt on which acceptance is
measured. A line of code is about as long."""

Report = Callable[[str, str, int, int], None]
"""Callback that shows the progress: `report(stage, text, done, total)`, where `text` describes the stage, and `done` of
its `total` units are finished. It may raise StopRequested."""


def train(task: TrainingTask, stop: StopFlag, report: Report) -> dict[str, Any]:
    """Train with the settings in `task`, save the result in the folder `task.out`, and return the report that is saved
    there in the file REPORT.

    stop: flag that ends the training when it is set. report: called with the progress. Raises OutriderError if the
    training is not possible. Raises StopRequested once `stop` is set, after a checkpoint was saved.
    """
    num_parameters = check_folders(task)
    target = TargetFiles(task.target)
    for tap in task.taps or ():
        if not 0 <= tap < target.num_layers:
            raise ConfigError(f"--taps has {tap}, must be from 0 to {target.num_layers - 1} for {task.target}")
    device = str(resolve_device(task.device))
    prompts = prompt_ids(task.target, exclude_overlaps(task.prompts, task.held_apart), task.raw)
    train_prompts = list(zip(prompts, itertools.cycle(task.temperatures)))
    if len(train_prompts) < task.batch_size:
        raise ConfigError(
            f"{len(task.prompts)} prompts, of which {len(train_prompts)} share no {SHARED_CHARS} characters with one "
            f"held apart; at least --batch-size, {task.batch_size}, are needed"
        )
    temperatures = sorted(set(task.temperatures))
    probe_prompts = _at_each(temperatures, prompt_ids(task.target, task.held_apart, task.raw))
    num_answers = len(train_prompts) + len(probe_prompts)
    report("estimate", describe(estimate_sizes(task, target, num_parameters, num_answers, prompts), device), 1, 1)
    work = Path(task.work)
    assignment = GenerationTask(task.target, train_prompts, task.max_tokens, task.seed, task.device)
    answers = generate(assignment, work, partial(report, "text", "tokens to train on"))
    probe_assignment = GenerationTask(task.target, probe_prompts, task.max_tokens, task.seed, task.device)
    probes = generate(probe_assignment, work, partial(report, "held apart", "tokens to measure on"))
    teacher = Teacher(task.target, device)
    student = _create_student(task, teacher, target, answers)
    facts = _facts(task, assignment, student)
    plan = TrainingPlan(task.loss, task.updates, task.batch_size, task.seed)
    folder = work / f"{task.kind}-{task.loss}"
    rows = _measure_before(task, student, teacher, probes, folder, report)
    run = TrainingRun(student, teacher, answers, plan, folder, facts)

    def report_progress(progress: Progress) -> None:
        memory = f"{progress.peak_bytes / 2**20:.0f} MiB of memory at most"
        text = f"loss {progress.loss:.3f}, {progress.tokens_per_s:.0f} tokens/s, {memory}"
        report("training", text, progress.updates, plan.updates)

    run.train(task.seconds, stop.is_set, report_progress)
    stop.check()
    summary = {
        **facts,
        **asdict(plan),
        "temperatures": task.temperatures,
        "num_answers": len(answers),
        "num_tokens": sum(len(answer.ids) - answer.start for answer in answers),
        "updates_done": run.num_updates,
        "seconds": round(run.trained_s),
        "peak_bytes": peak_bytes(),
        "acceptance": rows,
    }
    out = Path(task.out)
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / REPORT, summary)  # before the weights: by this file a later training may replace the folder
    student.save(out)
    rows += measure("after", _load_student(task, target, teacher), teacher, probes, report)  # as saved, in bfloat16
    _write_json(out / REPORT, summary)
    return summary


def _at_each(temperatures: Sequence[float], prompts: Sequence[Ids]) -> list[tuple[Ids, float]]:
    pairs = []
    for temperature in temperatures:
        for ids in prompts:
            pairs.append((ids, temperature))
    return pairs


def _facts(task: TrainingTask, assignment: GenerationTask, student: Student) -> dict[str, Any]:
    # what decides the weights, besides the plan
    facts: dict[str, Any] = {
        "kind": task.kind,
        "text": assignment.digest,
        "start": None,
        "depth": task.depth,
        "taps": None,
        "draft_vocab": task.draft_vocab,
    }
    if task.start is not None:
        facts["start"] = digest_of_model(task.start)
    if isinstance(student, Eagle3):
        facts["taps"] = list(student.module.head.facts.taps)
    return facts


def measure(
    name: str, student: Student, teacher: Teacher, answers: Sequence[Answer], report: Report
) -> list[dict[str, Any]]:
    """Measure acceptance on the outputs `answers`. Return the report's rows, one for each of their temperatures and
    each depth (position of a draft token in its round). name: name of the drafter in the rows.
    """
    rows: list[dict[str, Any]] = []
    temperatures = sorted({answer.temperature for answer in answers})
    for index, temperature in enumerate(temperatures):
        report("acceptance", f"{name}, temperature {temperature:g}", index, len(temperatures))
        matching = [answer for answer in answers if answer.temperature == temperature]
        rows += measure_acceptance(name, student, teacher, matching, temperature)
    report("acceptance", name, len(temperatures), len(temperatures))
    return rows


def _measure_before(
    task: TrainingTask, student: Student, teacher: Teacher, answers: Sequence[Answer], folder: Path, report: Report
) -> list[dict[str, Any]]:
    # once for a training, also where it is continued: the untrained student, and the draft that a head starts from
    path = folder / "before.json"
    if path.is_file() and (folder / "checkpoint.pt").is_file():
        rows: list[dict[str, Any]] = json.loads(path.read_bytes())
        return rows
    rows = []
    if task.kind != "draft" and task.start is not None:
        rows += measure("draft", Draft(task.start, teacher.vocab_size, teacher.device), teacher, answers, report)
    rows += measure("before", student, teacher, answers, report)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(path, rows)
    return rows


def _create_student(task: TrainingTask, teacher: Teacher, target: TargetFiles, answers: Sequence[Answer]) -> Student:
    if task.kind == "draft":
        assert task.start is not None
        return Draft(task.start, teacher.vocab_size, teacher.device)
    if task.kind == "pass":
        return LookaheadEmbeddings.new(teacher, task.depth, task.seed)
    taps = task.taps or default_taps(teacher.num_layers)
    teacher.check_hidden()
    if task.kind == "medusa":
        return Medusa.new(target, task.depth, teacher.device)
    kept = None
    if task.draft_vocab is not None:
        kept = frequent_ids(answers, task.draft_vocab, teacher.vocab_size)
    return Eagle3(ProjectedHead.new(target, task.start, taps, kept, task.seed), task.depth, teacher.device)


def _load_student(task: TrainingTask, target: TargetFiles, teacher: Teacher) -> Student:
    if task.kind == "draft":
        return Draft(task.out, target.vocab_size, teacher.device)
    if task.kind == "pass":
        return LookaheadEmbeddings.load(task.out, teacher)
    if task.kind == "medusa":
        return Medusa.load(task.out, target, teacher.device)
    return Eagle3.load(task.out, target, teacher.device)


def default_taps(num_layers: int) -> list[int]:
    """Return the indices of the target's hidden states for a head to read: from an early, a middle and a late layer.

    For n layers they are 2, n // 2 and n - 3 (EAGLE-3) if these ascend, otherwise those of 1, n // 2 and n - 1 that n
    layers have, each once.
    """
    published = [2, num_layers // 2, num_layers - 3]
    if published[0] < published[1] < published[2]:
        return published
    return sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1})


def frequent_ids(answers: Sequence[Answer], count: int, vocab_size: int) -> Tensor:
    """Return the `count` token ids that are most frequent in the outputs, [count] int64, ascending.

    Of ids with equal frequency the lowest are taken. Raises ConfigError for a count above the vocabulary size or below
    1.
    """
    if not 1 <= count <= vocab_size:
        raise ConfigError(f"--draft-vocab is {count}, must be 1 to {vocab_size}, the target's vocabulary")
    output_ids = np.concatenate([answer.ids[answer.start :] for answer in answers])
    frequencies = np.bincount(output_ids, minlength=vocab_size)  # [vocab_size] int64
    return torch.from_numpy(np.sort(np.argsort(-frequencies, kind="stable")[:count]))


def exclude_overlaps(prompts: Sequence[str], held_apart: Sequence[str]) -> list[str]:
    """Return the prompts that share no substring of SHARED_CHARS characters with a text in `held_apart`."""
    forbidden: set[str] = set()
    for text in held_apart:
        forbidden.update(_substrings(text))
    return [text for text in prompts if forbidden.isdisjoint(_substrings(text))]


def _substrings(text: str) -> Iterator[str]:
    for start in range(max(1, len(text) - SHARED_CHARS + 1)):
        yield text[start : start + SHARED_CHARS]


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Read the settings from stdin, train, and write events to stdout. Return the exit code of the process: 1 after an
    error, which is one of the events, otherwise 0.
    """
    stop = StopFlag()
    stop.install()

    def show(stage: str, text: str, done: int, total: int) -> None:
        write_event({"event": "progress", "stage": stage, "text": text, "done": done, "total": total})
        if stage != "training":  # which saves its checkpoint first
            stop.check()

    try:
        report = train(TrainingTask(**json.loads(sys.stdin.readline())), stop, show)
    except StopRequested:
        write_event({"event": "stopped"})
        return 0
    except OutriderError as error:
        write_event({"event": "failed", "message": error.message})
        return 1
    write_event({"event": "trained", "report": report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
