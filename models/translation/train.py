"""Make the tokenizer, train the teacher, or distil a student from it, for a time or a number of steps, on CPU or GPU.

    python -m models.translation.train WORK tokenizer                   and WORK/prompts.jsonl, WORK/text.txt
    python -m models.translation.train WORK teacher --seconds 1320      cross-entropy on pairs of the grammar
    python -m models.translation.train WORK target --seconds 420        distillation from WORK/teacher
    python -m models.translation.train WORK draft --seconds 420

A student's loss is the cross-entropy to the teacher's whole distribution along the grammar's translations, as in the
demo pair's recipe. Every batch is new: the grammar does not end.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, softmax
from transformers import AutoTokenizer, T5ForConditionalGeneration

from models.translation.pair import (
    PAD_ID,
    SIZES,
    TOKENIZER_FOLDER,
    batches,
    held_out_pairs,
    load_model,
    make_grammar,
    make_tokenizer,
    new_model,
    text_to_count_in,
    training_pairs,
)
from outrider.training.optimizing import Length, Optimizers, default_device, mixed_precision, rate_scale

NUM_VALIDATION_BATCHES = 4
VALIDATION_BATCH_SIZE = 64
NUM_PROMPTS = 64
UNSCALED = (".q.weight", ".k.weight")
"""Endings of the names of weights that AdamW updates in place of Muon: T5's queries and keys. After 250 updates the
teacher's loss was 1.85 nats a token, and 2.91 with Muon for these weights, too."""


@dataclass(frozen=True, slots=True)
class Plan(Length):
    """Length and width of a training run."""

    batch_size: int
    """Number of pairs in a batch."""
    report_every: int
    """Number of steps after which the held-out measures are printed and a checkpoint saved."""
    seed: int


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How good a model is on held-out pairs, as means over the tokens of their translations."""

    loss: float
    """Cross-entropy to the right token, in nats a token."""
    right: float
    """Fraction of tokens for which the model's likeliest token is the right one."""
    agreement: float | None = None
    """Fraction of tokens for which the model's likeliest token is the teacher's; None for the teacher itself."""
    overlap: float | None = None
    """Mean sum of min(p, q) over the vocabulary, of the model's and the teacher's next-token distributions p and q at
    temperature 1; None for the teacher itself."""

    def __str__(self) -> str:
        shares = {"right": self.right, "agrees with the teacher": self.agreement, "overlap": self.overlap}
        texts = [f"{name} {share:.3f}" for name, share in shares.items() if share is not None]
        return f"held out {self.loss:.3f} nats, {', '.join(texts)}"


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy to the target tokens, in nats a token, without padding.

    logits: [B, T, V] float32. targets: [B, T] int64.
    """
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD_ID)


def distillation_loss(logits: Tensor, teacher_logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy to the teacher's distribution, in nats a token, without padding.

    logits, teacher_logits: [B, T, V] float32. targets: [B, T] int64.
    """
    losses = -(softmax(teacher_logits, -1) * log_softmax(logits, -1)).sum(-1)  # [B, T]
    return losses[targets != PAD_ID].mean()


class Trainer:
    """One training run of one model. `run` performs all of it."""

    def __init__(self, work: Path, which: str, plan: Plan, device: str, resume: bool) -> None:
        self._folder = work / which
        self._plan = plan
        self._device = device
        self._tokenizer = AutoTokenizer.from_pretrained(work / TOKENIZER_FOLDER)
        self._grammar = make_grammar()
        torch.manual_seed(plan.seed)
        start = load_model(self._folder, "cpu") if resume else new_model(which)
        self.model = start.to(device).train()
        self._teacher = None if which == "teacher" else load_model(work / "teacher", device)
        self._optimizers = Optimizers(self.model, UNSCALED)

    def run(self) -> HeldOut:
        """Train and save the model. Return how good it is on held-out pairs."""
        plan = self._plan
        start_s = time.monotonic()
        step = 0
        num_tokens = 0
        for sources, targets in self._batches(training_pairs(self._grammar, plan.seed + 1), plan.batch_size):
            done = plan.share_done(time.monotonic() - start_s, step)
            if done >= 1:
                break
            loss = self._loss(sources, targets)
            self._optimizers.step(loss, rate_scale(done, step))
            step = step + 1
            num_tokens = num_tokens + sources.numel() + targets.numel()
            if step % plan.report_every == 0:
                self._report(step, time.monotonic() - start_s, num_tokens, loss.item())
        return self._report(step, time.monotonic() - start_s, num_tokens)

    def _batches(self, pairs: Iterator[tuple[str, str]], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for sources, targets in batches(pairs, self._tokenizer, batch_size, self._plan.seed):
            yield sources.to(self._device), targets.to(self._device)

    def _logits(self, model: T5ForConditionalGeneration, sources: Tensor, targets: Tensor) -> Tensor:
        """Return the logits [B, T, V] float32 at each token of the targets."""
        before = torch.cat([torch.full_like(targets[:, :1], PAD_ID), targets[:, :-1]], dim=1)
        mask = (sources != PAD_ID).long()
        with mixed_precision(self._device):
            logits = model(input_ids=sources, attention_mask=mask, decoder_input_ids=before, use_cache=False).logits
        return logits.float()

    def _loss(self, sources: Tensor, targets: Tensor) -> Tensor:
        logits = self._logits(self.model, sources, targets)
        if self._teacher is None:
            return token_loss(logits, targets)
        with torch.no_grad():
            teacher_logits = self._logits(self._teacher, sources, targets)
        return distillation_loss(logits, teacher_logits, targets)

    @torch.no_grad()
    def validate(self) -> HeldOut:
        """Return how good the model is on held-out pairs, which are the same at each call."""
        losses = 0.0
        right = 0
        agreement = 0
        overlap = 0.0
        num_tokens = 0
        found = self._batches(held_out_pairs(self._grammar), VALIDATION_BATCH_SIZE)
        for sources, targets in itertools.islice(found, NUM_VALIDATION_BATCHES):
            counts = targets != PAD_ID
            logits, gold = self._logits(self.model, sources, targets)[counts], targets[counts]  # [N, V], [N]
            losses += cross_entropy(logits, gold, reduction="sum").item()
            right += int((logits.argmax(-1) == gold).sum())
            num_tokens += len(gold)
            if self._teacher is not None:
                own = self._logits(self._teacher, sources, targets)[counts]
                agreement += int((logits.argmax(-1) == own.argmax(-1)).sum())
                overlap += float(torch.minimum(softmax(logits, -1), softmax(own, -1)).sum())
        if self._teacher is None:
            return HeldOut(losses / num_tokens, right / num_tokens)
        return HeldOut(losses / num_tokens, right / num_tokens, agreement / num_tokens, overlap / num_tokens)

    def _report(self, step: int, elapsed_s: float, num_tokens: int, loss: float | None = None) -> HeldOut:
        held_out = self.validate()
        self._save()
        training = "" if loss is None else f", training loss {loss:.3f}"
        print(f"{elapsed_s:.0f} s, {step} steps, {num_tokens / 1e6:.2f}M tokens{training}, {held_out}", flush=True)
        return held_out

    def _save(self) -> None:
        """Save a bfloat16 copy with its tokenizer: rounding the weights in training themselves would cost accuracy."""
        copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(self._folder)
        self._tokenizer.save_pretrained(self._folder)


def prepare(work: Path) -> None:
    """Write into `work` the tokenizer, prompts (sentences of held-out pairs), and a text of De for drafters that count
    n-grams.
    """
    grammar = make_grammar()
    work.mkdir(parents=True, exist_ok=True)
    make_tokenizer(grammar).save_pretrained(work / TOKENIZER_FOLDER)
    with (work / "prompts.jsonl").open("w", encoding="utf-8") as out:
        for source, _ in itertools.islice(held_out_pairs(grammar), NUM_PROMPTS):
            out.write(json.dumps({"prompt": source}) + "\n")
    (work / "text.txt").write_text(text_to_count_in(grammar), encoding="utf-8")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder to write into")
    parser.add_argument("which", choices=["tokenizer", *SIZES])
    parser.add_argument("--seconds", type=float, help="wall-clock time to train for")
    parser.add_argument("--steps", type=int, help="updates to train for, in place of a time")
    parser.add_argument("--batch-size", type=int, help="pairs an update; default 32 on CPU, 256 on a GPU")
    parser.add_argument("--report-every", type=int, default=500, help="updates between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of weights and pairs; take another with --resume")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--resume", action="store_true", help="start from the weights in WORK, with a fresh optimizer")
    args = parser.parse_args(argv)
    for name in ("seconds", "steps", "batch_size", "report_every"):
        if (value := getattr(args, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}, must be above 0")
    if args.which != "tokenizer" and (args.seconds is None) == (args.steps is None):
        parser.error("give one of --seconds and --steps")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.which == "tokenizer":
        prepare(args.work)
        return
    plan = Plan(
        seconds=args.seconds,
        steps=args.steps,
        batch_size=args.batch_size or (32 if args.device == "cpu" else 256),
        report_every=args.report_every,
        seed=args.seed,
    )
    Trainer(args.work, args.which, plan, args.device, args.resume).run()


if __name__ == "__main__":
    main()
