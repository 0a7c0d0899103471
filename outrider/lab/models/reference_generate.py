"""Compares outputs with those of transformers' `generate`: the process that `outrider demo` starts.

    python -m outrider.lab.models.reference_generate

It reads one line of JSON on stdin, {"model", "max_tokens", "repetition_penalty", "prompts": [str], "answers": [[token
id]]}, and writes one on stdout, {"event": "compared", "num_tokens", "differences": [{"answer", "position", "expected",
"found", "top2_gap"}]}. Of Outrider it imports only the table of transformers' classes, so that it shares no mistake of
the engine.
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
    """The greedy output that transformers generates for one prompt."""

    prompt_ids: Ids
    ids: Ids
    """Token ids of the output. The last is an end-of-sequence id if the output ended with one."""
    gaps: list[float]
    """Difference between the two largest logits at each token of `ids`. Where it is small, rounding alone may change
    which token is the most likely."""


class Reference:
    """A model run by transformers, in float32 on the CPU, one prompt at a time."""

    def __init__(self, model: str) -> None:
        """Load a model, given as a folder, a GGUF file or a hub id."""
        place: dict[str, Any] = {"pretrained_model_name_or_path": model}
        if model.endswith(".gguf"):
            separator = "/" if os.path.exists(model) else ":"
            folder, _, file = model.rpartition(separator)
            place = {"pretrained_model_name_or_path": folder or ".", "gguf_file": file}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(**place)
        config = AutoConfig.from_pretrained(**place)
        self._has_encoder = bool(config.is_encoder_decoder)
        self.model: Any = whole_class(config).from_pretrained(**place, dtype=torch.float32)  # in eval mode

    def generate(self, prompt: str, max_tokens: int, repetition_penalty: float = 1.0) -> Generated:
        """Return the greedy output to a prompt, at most `max_tokens` tokens."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        result = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_tokens,
            repetition_penalty=repetition_penalty,
            return_dict_in_generate=True,
            output_scores=True,
        )
        prompt_ids = inputs["input_ids"][0].tolist()
        gaps = []
        for scores in result.scores:
            best, second = scores[0].topk(2).values  # [2] float32
            gaps.append(float(best - second))
        return Generated(prompt_ids, result.sequences[0, self._num_before(prompt_ids) :].tolist(), gaps)

    def search(
        self, prompt: str, width: int, max_tokens: int, length_penalty: float = 1.0, early_stopping: bool | str = False
    ) -> list[tuple[Ids, float]]:
        """Run a beam search with `width` beams. Return (token ids, score) of each of its `width` outputs, best first.
        The score is transformers' `sequences_scores`.
        """
        inputs = self.tokenizer(prompt, return_tensors="pt")
        result = self.model.generate(
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
        outputs = []
        for sequence, score in zip(result.sequences.tolist(), result.sequences_scores.tolist(), strict=True):
            outputs.append((self._up_to_end(sequence[num_before:]), score))
        return outputs

    def without_end(self, ids: Ids) -> Ids:
        """Return the token ids of an output without its last one if that is an end-of-sequence id."""
        if ids and ids[-1] in self._ends:
            return ids[:-1]
        return ids

    def _up_to_end(self, ids: Ids) -> Ids:
        for index, token_id in enumerate(ids):
            if token_id in self._ends:
                return ids[: index + 1]
        return ids

    def _num_before(self, prompt_ids: Ids) -> int:
        if self._has_encoder:
            return 1  # a decoder begins with one token of its own
        return len(prompt_ids)

    @property
    def _ends(self) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        if isinstance(ends, list):
            return ends
        return [ends]


def first_difference(expected: Ids, found: Ids) -> int | None:
    """Return the first index at which two lists of token ids differ, or the shorter one ends; None = they are equal."""
    for index, (expected_id, found_id) in enumerate(itertools.zip_longest(expected, found)):
        if expected_id != found_id:
            return index
    return None


def compare(reference: Reference, expected: Generated, found: Ids) -> dict[str, Any] | None:
    """Compare an output (`found`) with the expected one, and describe the first difference; None = they are equal.

    The result has the `position` of the first difference, the token ids `expected` and `found` at that position, and
    `top2_gap`, the entry of `Generated.gaps` for it. An end-of-sequence id at the end of an output is ignored, since
    the gateway does not send it.
    """
    expected_ids = reference.without_end(expected.ids)
    found_ids = reference.without_end(found)
    position = first_difference(expected_ids, found_ids)
    if position is None:
        return None
    return {
        "position": position,
        "expected": _id_at(expected_ids, position),
        "found": _id_at(found_ids, position),
        "top2_gap": expected.gaps[min(position, len(expected.gaps) - 1)],
    }


def _id_at(ids: Ids, index: int) -> int | None:
    if index >= len(ids):
        return None
    return ids[index]


def main() -> int:
    """Read a task from stdin, generate the reference outputs, compare the given outputs with them, and write the
    differences to stdout. Return the exit code of the process.
    """
    quiet: Any = transformers_logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    task = json.loads(sys.stdin.readline())
    reference = Reference(task["model"])
    expected = {}
    for prompt in dict.fromkeys(task["prompts"]):
        expected[prompt] = reference.generate(prompt, task["max_tokens"], task["repetition_penalty"])
    differences: list[dict[str, Any]] = []
    num_tokens = 0
    for index, (prompt, answer) in enumerate(zip(task["prompts"], task["answers"], strict=True)):
        num_tokens += len(reference.without_end(expected[prompt].ids))
        difference = compare(reference, expected[prompt], answer)
        if difference is not None:
            differences.append({"answer": index, **difference})
    sys.stdout.write(json.dumps({"event": "compared", "num_tokens": num_tokens, "differences": differences}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
