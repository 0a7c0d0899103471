"""`python -m deploy.reference_generate`: what transformers' own `generate` makes of prompts, compared with answers.

Shares nothing with our engine: the judge of `outrider demo`. One line of JSON on stdin,
{"model", "max_tokens", "prompts": [str], "answers": [[token id]]}; one on stdout,
{"event": "compared", "num_tokens", "differences": [{"answer", "position", "expected", "found", "top2_gap"}]}.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

Ids = list[int]


class Reference:
    """The target alone: greedy, float32, on the CPU, one prompt at a time."""

    def __init__(self, model: str, max_tokens: int) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)  # in eval mode
        self._max_tokens = max_tokens
        self._made: dict[str, tuple[Ids, list[torch.Tensor]]] = {}

    def generate(self, prompt: str) -> tuple[Ids, list[torch.Tensor]]:
        """(output ids without a final end-of-sequence id, each position's logits [1, V] float32)."""
        if prompt not in self._made:
            self._made[prompt] = self._generate(prompt)
        return self._made[prompt]

    def _generate(self, prompt: str) -> tuple[Ids, list[torch.Tensor]]:
        inputs = self._tokenizer(prompt, return_tensors="pt")
        made = self._model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=self._max_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return self.without_end(ids), list(made.logits)

    def without_end(self, ids: Ids) -> Ids:
        ends = self._model.generation_config.eos_token_id
        return ids[:-1] if ids and ids[-1] in (ends if isinstance(ends, list) else [ends]) else ids


def first_difference(expected: Ids, found: Ids) -> int | None:
    """Position of the first id that differs, or at which one of them has ended; None when they are equal."""
    pairs = itertools.zip_longest(expected, found)
    return next((position for position, (one, other) in enumerate(pairs) if one != other), None)


def compare(reference: Reference, prompt: str, found: Ids) -> tuple[int, dict[str, Any] | None]:
    """(tokens compared, the first difference). `top2_gap` is the gap of its two best logits: small at a near-tie."""
    expected, logits = reference.generate(prompt)
    found = reference.without_end(found)
    position = first_difference(expected, found)
    if position is None:
        return len(expected), None
    best = logits[min(position, len(logits) - 1)][0].topk(2).values
    difference = {
        "position": position,
        "expected": expected[position] if position < len(expected) else None,
        "found": found[position] if position < len(found) else None,
        "top2_gap": float(best[0] - best[1]),
    }
    return len(expected), difference


def main() -> int:
    quiet: Any = transformers_logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    task = json.loads(sys.stdin.readline())
    reference = Reference(task["model"], task["max_tokens"])
    differences: list[dict[str, Any]] = []
    num_tokens = 0
    for index, (prompt, answer) in enumerate(zip(task["prompts"], task["answers"], strict=True)):
        compared, difference = compare(reference, prompt, answer)
        num_tokens += compared
        if difference is not None:
            differences.append({"answer": index, **difference})
    sys.stdout.write(json.dumps({"event": "compared", "num_tokens": num_tokens, "differences": differences}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
