"""`python -m outrider.lab.models.reference_generate`: compare answers with what transformers' own `generate` writes.

`outrider demo` has its answers judged here. Of Outrider's it imports alone which class of transformers a model is, so
that it shares none of our mistakes. It reads one line of JSON on stdin, {"model", "max_tokens", "repetition_penalty",
"prompts": [str], "answers": [[token id]]}, and writes one on stdout, {"event": "compared", "num_tokens", "differences":
[{"answer", "position", "expected", "found", "top2_gap"}]}.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from outrider.engine.architectures.text_part import whole_class

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Generated:
    """The target's own answer to one prompt."""

    prompt_ids: Ids
    ids: Ids
    """Token ids, the end-of-sequence id included when the answer reached one."""
    gaps: list[float]
    """Distance of the two best logits at each position of `ids`: small at a near-tie."""


class Reference:
    """The target alone: greedy, float32, on the CPU, one prompt at a time."""

    def __init__(self, model: str) -> None:
        """Load a folder, a GGUF file or a hub id."""
        place: dict[str, Any] = {"pretrained_model_name_or_path": model}
        if model.endswith(".gguf"):
            folder, _, file = model.rpartition("/" if os.path.exists(model) else ":")
            place = {"pretrained_model_name_or_path": folder or ".", "gguf_file": file}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(**place)
        config = AutoConfig.from_pretrained(**place)
        self._has_encoder = bool(config.is_encoder_decoder)
        self.model: Any = whole_class(config).from_pretrained(**place, dtype=torch.float32)  # in eval mode

    def generate(self, prompt: str, max_tokens: int, repetition_penalty: float = 1.0) -> Generated:
        inputs = self.tokenizer(prompt, return_tensors="pt")
        made = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_tokens,
            repetition_penalty=repetition_penalty,
            return_dict_in_generate=True,
            output_scores=True,
        )
        prompt_ids = inputs["input_ids"][0].tolist()
        best = [scores[0].topk(2).values for scores in made.scores]  # [2] float32 each
        gaps = [float(two[0] - two[1]) for two in best]
        return Generated(prompt_ids, made.sequences[0, self._num_before(prompt_ids) :].tolist(), gaps)

    def search(
        self, prompt: str, width: int, max_tokens: int, length_penalty: float = 1.0, early_stopping: bool | str = False
    ) -> list[tuple[Ids, float]]:
        """Return the ids and scores of all `width` answers of a beam search, best first."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        made = self.model.generate(
            **inputs,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        num_before = self._num_before(inputs["input_ids"][0].tolist())
        rows = (row[num_before:] for row in made.sequences.tolist())
        return [(self._up_to_end(row), score) for row, score in zip(rows, made.sequences_scores.tolist(), strict=True)]

    def without_end(self, ids: Ids) -> Ids:
        return ids[:-1] if ids and ids[-1] in self._ends else ids

    def _up_to_end(self, ids: Ids) -> Ids:
        last = next((place for place, token_id in enumerate(ids) if token_id in self._ends), len(ids))
        return ids[: last + 1]

    def _num_before(self, prompt_ids: Ids) -> int:
        return 1 if self._has_encoder else len(prompt_ids)  # a decoder begins with one token of its own

    @property
    def _ends(self) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [ends]


def first_difference(expected: Ids, found: Ids) -> int | None:
    """Return the position of the first id that differs, or at which one of them has ended; None when they are equal."""
    pairs = itertools.zip_longest(expected, found)
    return next((position for position, (one, other) in enumerate(pairs) if one != other), None)


def compare(reference: Reference, expected: Generated, found: Ids) -> dict[str, Any] | None:
    """Return the first difference, or None. Final end-of-sequence ids are ignored: the gateway sends none."""
    wanted, found = reference.without_end(expected.ids), reference.without_end(found)
    position = first_difference(wanted, found)
    if position is None:
        return None
    return {
        "position": position,
        "expected": wanted[position] if position < len(wanted) else None,
        "found": found[position] if position < len(found) else None,
        "top2_gap": expected.gaps[min(position, len(expected.gaps) - 1)],
    }


def main() -> int:
    quiet: Any = transformers_logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    task = json.loads(sys.stdin.readline())
    reference = Reference(task["model"])
    how = (task["max_tokens"], task["repetition_penalty"])
    made = {prompt: reference.generate(prompt, *how) for prompt in dict.fromkeys(task["prompts"])}
    differences: list[dict[str, Any]] = []
    num_tokens = 0
    for index, (prompt, answer) in enumerate(zip(task["prompts"], task["answers"], strict=True)):
        num_tokens += len(reference.without_end(made[prompt].ids))
        if (difference := compare(reference, made[prompt], answer)) is not None:
            differences.append({"answer": index, **difference})
    sys.stdout.write(json.dumps({"event": "compared", "num_tokens": num_tokens, "differences": differences}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
