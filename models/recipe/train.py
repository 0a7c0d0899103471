"""Train the target, or distil the draft from it, for a time or a number of steps, on CPU or GPU.

    python -m models.recipe.train WORK target --seconds 3600     cross-entropy on WORK/train.bin
    python -m models.recipe.train WORK draft --seconds 900       distillation from WORK/target
    python -m models.recipe.train WORK draft --seconds 900 --alone    cross-entropy: its target has other tokens

The draft's loss is the cross-entropy to the target's whole distribution (KL plus a constant): speculation needs not a
good model but one close to the target, since its acceptance is 1 - TV(target, draft) (Leviathan et al. 2023, Corollary
3.6).

Muon on hidden matrices, AdamW on the rest; the rate is held, then taken linearly to zero over the second half.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy, log_softmax, softmax
from transformers import AutoTokenizer, LlamaForCausalLM

from models.recipe.pair import (
    SIZES,
    TOKENIZER_FOLDER,
    load_model,
    new_model,
    read_ids,
    sample_windows,
)
from outrider.training.optimizing import Length, Optimizers, default_device, mixed_precision, rate_scale

NUM_VALIDATION_BATCHES = 8
VALIDATION_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True)
class Plan(Length):
    """Length and width of a training run."""

    batch_size: int
    window: int
    """Number of tokens of one training example."""
    report_every: int
    """Number of steps after which the held-out loss is printed and a checkpoint saved."""
    seed: int


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy to the next token, in nats a token. logits: [B, T, V] float32. ids: [B, T]
    int64.
    """
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def distillation_loss(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy to the teacher's distribution, in nats a token. logits, teacher_logits: [B, T, V]
    float32.
    """
    return -(softmax(teacher_logits, -1) * log_softmax(logits, -1)).sum(-1).mean()


class Trainer:
    """One training run of one model. `run` performs all of it."""

    def __init__(self, work: Path, which: str, plan: Plan, device: str, *, resume: bool, alone: bool) -> None:
        """alone: it has no teacher."""
        self._folder = work / which
        self._plan = plan
        self._device = device
        self._parts = {part: read_ids(work / f"{part}.bin") for part in ("train", "val")}
        self._tokenizer = AutoTokenizer.from_pretrained(work / TOKENIZER_FOLDER)
        torch.manual_seed(plan.seed)
        start = load_model(self._folder, torch.float32, "cpu") if resume else new_model(which, len(self._tokenizer))
        self.model = start.to(device).train()
        has_teacher = which == "draft" and not alone
        self._teacher = load_model(work / "target", torch.float32, device) if has_teacher else None
        self._optimizers = Optimizers(self.model)

    def run(self) -> float:
        """Train and save the model. Return its held-out loss, in nats a token."""
        rng = np.random.default_rng(self._plan.seed)
        start_s = time.monotonic()
        step = 0
        while (done := self._plan.share_done(time.monotonic() - start_s, step)) < 1:
            loss = self._loss(self._windows(self._parts["train"], self._plan.batch_size, rng))
            self._optimizers.step(loss, rate_scale(done, step))
            step += 1
            if step % self._plan.report_every == 0:
                self._report(step, time.monotonic() - start_s, loss.item())
        return self._report(step, time.monotonic() - start_s)

    def _windows(self, part: npt.NDArray[np.uint16], count: int, rng: np.random.Generator) -> torch.Tensor:
        return sample_windows(part, count, self._plan.window, rng).to(self._device)  # [count, window] int64

    def _logits(self, model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
        with mixed_precision(self._device):
            return model(input_ids=ids).logits.float()  # [B, T, V] float32

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self._logits(self.model, ids)
        if self._teacher is None:
            return next_token_loss(logits, ids)
        with torch.no_grad():
            teacher_logits = self._logits(self._teacher, ids)
        return distillation_loss(logits, teacher_logits)

    @torch.no_grad()
    def _validate(self) -> float:
        rng = np.random.default_rng(7)  # the same windows every time
        losses = []
        for _ in range(NUM_VALIDATION_BATCHES):
            ids = self._windows(self._parts["val"], VALIDATION_BATCH_SIZE, rng)
            losses.append(next_token_loss(self._logits(self.model, ids), ids).item())
        return float(np.mean(losses))

    def _report(self, step: int, elapsed_s: float, loss: float | None = None) -> float:
        held_out = self._validate()
        self._save()
        tokens = step * self._plan.batch_size * self._plan.window
        training = "" if loss is None else f", training loss {loss:.3f}"
        print(
            f"{elapsed_s:.0f} s, {step} steps, {tokens / 1e6:.2f}M tokens{training}, held out {held_out:.3f}",
            flush=True,
        )
        return held_out

    def _save(self) -> None:
        """Save a bfloat16 copy with its tokenizer: rounding the weights in training themselves would cost accuracy."""
        copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(self._folder)
        self._tokenizer.save_pretrained(self._folder)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder that models.recipe.prepare filled")
    parser.add_argument("which", choices=list(SIZES))
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=float, help="wall-clock time to train for")
    length.add_argument("--steps", type=int, help="updates to train for")
    parser.add_argument("--batch-size", type=int, help="windows an update; default 8 on CPU, 64 on a GPU")
    parser.add_argument("--window", type=int, default=512, help="tokens a window")
    parser.add_argument("--report-every", type=int, default=500, help="updates between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of weights and windows; take another with --resume")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--resume", action="store_true", help="start from the weights in WORK, with a fresh optimizer")
    parser.add_argument("--alone", action="store_true", help="train a draft on text, with no target to distil it from")
    args = parser.parse_args(argv)
    for name in ("seconds", "steps", "batch_size", "window", "report_every"):
        if (value := getattr(args, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}, must be above 0")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    plan = Plan(
        seconds=args.seconds,
        steps=args.steps,
        batch_size=args.batch_size or (8 if args.device == "cpu" else 64),
        window=args.window,
        report_every=args.report_every,
        seed=args.seed,
    )
    Trainer(args.work, args.which, plan, args.device, resume=args.resume, alone=args.alone).run()


if __name__ == "__main__":
    main()
