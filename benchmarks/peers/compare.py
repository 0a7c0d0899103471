"""Check that the greedy answers of all engines are the target's own, by one forward of transformers over each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.15}
"""Logits; two best ones closer than this may swap with the order of a sum. bfloat16 keeps 8 bits of a logit's ten."""


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that the judge would not choose."""

    prompt: int
    position: int
    expected: int
    found: int
    gap: float
    """Distance between the judge's best logit and that of the token found."""


class Judge:
    """Runs the target alone, by transformers, in the dtype that the engines had."""

    def __init__(self, target: Path, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
        self._known: dict[tuple[int, ...], Difference | None] = {}

    def first_difference(self, index: int, prompt: Sequence[int], output: Sequence[int]) -> Difference | None:
        """Return the first difference, or None when every token is the best one after those before it."""
        key = (*prompt, -1, *output)
        if key not in self._known:
            self._known[key] = self._look(index, prompt, output)
        return self._known[key]

    @torch.inference_mode()
    def _look(self, index: int, prompt: Sequence[int], output: Sequence[int]) -> Difference | None:
        ids = torch.tensor([[*prompt, *output]])
        logits = self._model(ids, logits_to_keep=len(output) + 1).logits[0, :-1].float()  # [n, V]
        found = torch.tensor(list(output))
        wrong = (logits.argmax(-1) != found).nonzero()
        if not len(wrong):
            return None
        position = int(wrong[0])
        row = logits[position]
        gap = float(row.max() - row[found[position]])
        return Difference(index, position, int(row.argmax()), int(found[position]), gap)
