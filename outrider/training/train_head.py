"""`python -m outrider.training.train_head`: train a draft head or a draft for a target, for `outrider train-head`.

It reads one line of JSON on stdin, a `Task`, and writes lines on stdout: {"event": "progress", "stage", "text", "done",
"total"}, and at the end {"event": "trained", "report"}, {"event": "stopped", "updates"} or {"event": "failed",
"message"}.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from outrider.engine.files.model_files import check_folder
from outrider.engine.heads.checkpoint import TargetFiles
from outrider.engine.loading.loader import check_weights, read_config, resolve_device
from outrider.lab.models.alpha import check_same_tokens
from outrider.training.chats import prompt_ids
from outrider.training.eagle3 import Eagle3, Opened
from outrider.training.estimate import Sizes, describe
from outrider.training.losses import LossName
from outrider.training.measure import measured
from outrider.training.medusa import Medusa
from outrider.training.pass_embeddings import Pass
from outrider.training.run import Plan, Progress, Run, peak_bytes
from outrider.training.student import Draft, Student
from outrider.training.teacher import Teacher
from outrider.training.written import Answer, Assignment, digest_of_model, write
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.processes.processes import StopFlag, StopRequested, tell

REPORT = "training.json"
"""Beside the weights: how they were trained, and the acceptance before and after."""
SHARED_CHARS = 50
"""Characters in a row that a prompt for training may not share with one that is held apart. Doubling it lets through
what overlaps by a line of code."""

Kind = Literal["eagle3", "medusa", "pass", "draft"]


@dataclass(frozen=True)
class Task:
    """A training, as it is read from stdin."""

    kind: Kind
    target: str
    """Folder."""
    out: str
    """Folder to write."""
    work: str
    """Folder of the target's text and of checkpoints."""
    prompts: list[str]
    """The target continues them; its text is trained on."""
    held_apart: list[str]
    """Prompts on which acceptance is measured, at each temperature."""
    temperatures: list[float]
    """The first prompt is continued at the first one, and so on in turn."""
    start: str | None
    """Folder of a draft: what `draft` begins with; of eagle3 the shape, the embedding and the lm_head."""
    loss: LossName
    depth: int
    """Steps of training-time test, Medusa's heads, or look-ahead embeddings."""
    taps: list[int] | None
    """Hidden states that eagle3 reads; None for an early, a middle and a late one."""
    draft_vocab: int | None
    """Ids that eagle3 can say, the most frequent ones of the text; None for all."""
    updates: int
    batch_size: int
    max_tokens: int
    """Of an answer."""
    seed: int
    seconds: float | None
    """After which the training ends, done or not."""
    device: str = "auto"
    raw: bool = False
    """The prompts are text as it stands, also where the target has a chat template."""


Tell = Callable[[str, str, int, int], None]
"""Called with a stage, a text, and how much of how much of the stage is done. Raises StopRequested."""


def train(task: Task, stop: StopFlag, tell: Tell) -> dict[str, Any]:
    """Train, save and return the report. Raises OutriderError, and StopRequested with a checkpoint saved."""
    num_parameters = _check_folders(task)
    target = TargetFiles(task.target)
    for tap in task.taps or ():
        if not 0 <= tap < target.num_layers:
            raise ConfigError(f"--taps has {tap}, must be from 0 to {target.num_layers - 1} for {task.target}")
    device = str(resolve_device(task.device))
    prompts = prompt_ids(task.target, without_shared(task.prompts, task.held_apart), task.raw)
    texts = list(zip(prompts, itertools.cycle(task.temperatures)))
    if len(texts) < task.batch_size:
        raise ConfigError(
            f"{len(task.prompts)} prompts, of which {len(texts)} share no {SHARED_CHARS} characters with one held "
            f"apart; at least --batch-size, {task.batch_size}, are needed"
        )
    apart = prompt_ids(task.target, task.held_apart, task.raw)
    num_answers = len(texts) + len(apart) * len(set(task.temperatures))
    tell("estimate", describe(_sizes(task, target, num_parameters, num_answers, prompts), device), 1, 1)
    work = Path(task.work)
    assignment = Assignment(task.target, texts, task.max_tokens, task.seed, task.device)
    answers = write(assignment, work, lambda done, total: tell("text", "tokens to train on", done, total))
    crossed = [(ids, temperature) for temperature in sorted(set(task.temperatures)) for ids in apart]
    probes = write(
        Assignment(task.target, crossed, task.max_tokens, task.seed, task.device),
        work,
        lambda done, total: tell("held apart", "tokens to measure on", done, total),
    )
    teacher = Teacher(task.target, device)
    student = _student(task, teacher, target, answers)
    facts = {
        "kind": task.kind,
        "text": assignment.digest,
        "start": None if task.start is None else digest_of_model(task.start),
        "depth": task.depth,
        "taps": list(student.module.head.facts.taps) if isinstance(student, Eagle3) else None,
        "draft_vocab": task.draft_vocab,
    }
    plan = Plan(task.loss, task.updates, task.batch_size, task.seed)
    folder = work / f"{task.kind}-{task.loss}"
    rows = _before(task, student, teacher, target, probes, folder, tell)
    run = Run(student, teacher, answers, plan, folder, facts)

    def told(progress: Progress) -> None:
        memory = f"{progress.peak_bytes / 2**20:.0f} MiB of memory at most"
        words = f"loss {progress.loss:.3f}, {progress.tokens_per_s:.0f} tokens/s, {memory}"
        tell("training", words, progress.updates, plan.updates)

    run.go_on(task.seconds, stop.is_set, told)
    stop.check()
    report = {
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
    _write(out / REPORT, report)  # first: it says that the folder is ours
    student.save(out)
    rows += measure("after", _load(task, target, teacher), teacher, probes, tell)  # as it was saved: rounded
    _write(out / REPORT, report)
    return report


def measure(
    name: str, student: Student, teacher: Teacher, answers: Sequence[Answer], tell: Tell
) -> list[dict[str, Any]]:
    """Return the rows of `measured` at each temperature."""
    rows: list[dict[str, Any]] = []
    temperatures = sorted({answer.temperature for answer in answers})
    for index, temperature in enumerate(temperatures):
        tell("acceptance", f"{name}, temperature {temperature:g}", index, len(temperatures))
        own = [answer for answer in answers if answer.temperature == temperature]
        rows += measured(name, student, teacher, own, temperature)
    tell("acceptance", name, len(temperatures), len(temperatures))
    return rows


def _before(
    task: Task,
    student: Student,
    teacher: Teacher,
    target: TargetFiles,
    answers: Sequence[Answer],
    folder: Path,
    tell: Tell,
) -> list[dict[str, Any]]:
    """Measure what is there before the training, once: the student, and beside a head the draft that it starts from."""
    path = folder / "before.json"
    if path.is_file() and (folder / "checkpoint.pt").is_file():
        rows: list[dict[str, Any]] = json.loads(path.read_bytes())
        return rows
    rows = []
    if task.kind != "draft" and task.start is not None:
        rows += measure("draft", Draft(task.start, teacher.vocab_size, teacher.device), teacher, answers, tell)
    rows += measure("before", student, teacher, answers, tell)
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, rows)
    return rows


def _student(task: Task, teacher: Teacher, target: TargetFiles, answers: Sequence[Answer]) -> Student:
    if task.kind == "draft":
        assert task.start is not None
        return Draft(task.start, teacher.vocab_size, teacher.device)
    if task.kind == "pass":
        return Pass.new(teacher, task.depth, task.seed)
    taps = task.taps or default_taps(teacher.num_layers)
    teacher.check_hidden()
    if task.kind == "medusa":
        return Medusa.new(target, task.depth, teacher.device)
    kept = None if task.draft_vocab is None else frequent_ids(answers, task.draft_vocab, teacher.vocab_size)
    return Eagle3(Opened.new(target, task.start, taps, kept, task.seed), task.depth, teacher.device)


def _load(task: Task, target: TargetFiles, teacher: Teacher) -> Student:
    if task.kind == "draft":
        return Draft(task.out, target.vocab_size, teacher.device)
    if task.kind == "pass":
        return Pass.load(task.out, teacher)
    return (Medusa if task.kind == "medusa" else Eagle3).load(task.out, target, teacher.device)


def default_taps(num_layers: int) -> list[int]:
    """Return an early, a middle and a late hidden state: EAGLE-3's where the target has layers enough for them."""
    published = [2, num_layers // 2, num_layers - 3]
    if published[0] < published[1] < published[2]:
        return published
    return sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1})


def frequent_ids(answers: Sequence[Answer], count: int, vocab_size: int) -> Tensor:
    """Return the ids [count] int64 that are most often in what the target wrote, ascending; among equals the lowest.

    Raises ConfigError when there are no so many.
    """
    if not 1 <= count <= vocab_size:
        raise ConfigError(f"--draft-vocab is {count}, must be 1 to {vocab_size}, the target's vocabulary")
    seen = np.bincount(np.concatenate([answer.ids[answer.start :] for answer in answers]), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-seen, kind="stable")[:count]))


def without_shared(prompts: Sequence[str], held_apart: Sequence[str]) -> list[str]:
    """Return the prompts that share no SHARED_CHARS characters in a row with one that is held apart."""
    apart = {run for text in held_apart for run in _runs(text)}
    return [text for text in prompts if not any(run in apart for run in _runs(text))]


def _runs(text: str) -> list[str]:
    return [text[start : start + SHARED_CHARS] for start in range(max(1, len(text) - SHARED_CHARS + 1))]


def _write(path: Path, what: Any) -> None:
    path.write_text(json.dumps(what, indent=1) + "\n", encoding="utf-8")


def _sizes(
    task: Task, target: TargetFiles, num_parameters: dict[str, int], num_answers: int, prompts: Sequence[Sequence[int]]
) -> Sizes:
    """num_parameters: by folder, of the target and of the draft that it starts from."""
    num_target = num_parameters[task.target]
    if task.start is not None:
        num_trained = num_parameters[task.start]
    elif task.kind == "eagle3":  # a layer of the target's shape, and the map that opens the head
        num_trained = num_target // target.num_layers + 3 * target.width**2
    else:
        num_trained = task.depth * target.width * (target.width if task.kind == "medusa" else 1)
    return Sizes(
        num_target_parameters=num_target,
        num_trained_parameters=num_trained,
        vocab_size=target.vocab_size,
        num_answers=num_answers,
        max_tokens=task.max_tokens,
        prompt_tokens=sum(map(len, prompts)) // len(prompts),
        updates=task.updates,
        batch_size=task.batch_size,
        depth=task.depth,
    )


def _check_folders(task: Task) -> dict[str, int]:
    """Return the number of parameters of target and --start, by folder.

    Raises ConfigError for a model that lacks a file, and for an --out that holds something else.
    """
    num_parameters: dict[str, int] = {}
    for model in (task.target, task.start):
        if model is not None:
            check_folder(Path(model).expanduser())
            network = check_weights(model, read_config(model))
            num_parameters[model] = sum(each.numel() for each in network.parameters())
    if task.start is not None:
        check_same_tokens(task.target, task.start)
    out = Path(task.out)
    if out.exists() and not (out.is_dir() and ((out / REPORT).is_file() or not any(out.iterdir()))):
        raise ConfigError(
            f"--out is {task.out!r}, which holds something else than an earlier training; name a new folder"
        )
    return num_parameters


def main() -> int:
    stop = StopFlag()
    stop.install()

    def show(stage: str, text: str, done: int, total: int) -> None:
        tell({"event": "progress", "stage": stage, "text": text, "done": done, "total": total})
        if stage != "training":  # which saves its checkpoint first
            stop.check()

    try:
        report = train(Task(**json.loads(sys.stdin.readline())), stop, show)
    except StopRequested:
        tell({"event": "stopped"})
        return 0
    except OutriderError as error:
        tell({"event": "failed", "message": error.message})
        return 1
    tell({"event": "trained", "report": report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
