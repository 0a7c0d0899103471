"""What the target alone says, by transformers itself in a process of its own: the judge of every parity test.

`python -m tests.e2e.reference` reads one line of JSON,

    {"model", "max_tokens", "generate": [prompt text], "check": [{"prompt": text, "ids": [output id]}]},

and writes one. `generate` runs transformers' own `generate`, greedy, one prompt at a time. `check` is for outputs whose
length is not known beforehand: one forward over prompt and output says whether each id is the best one after those
before it, which by induction is the same as being what `generate` would say.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.stack import REPO

NEAR_TIE = 1e-3
"""A first difference is forgiven (and listed) where the two best logits are closer than this."""


@dataclass(frozen=True)
class Answer:
    """Of `generate`. `gaps[i]` is the distance of the two best logits at output position i."""

    prompt_ids: list[int]
    ids: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class Difference:
    """Where an output first leaves the reference. None: that side has ended."""

    position: int
    expected: int | None
    found: int | None
    gap: float

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE


@dataclass(frozen=True)
class Judgement:
    answers: list[Answer] = field(default_factory=list)
    """One per prompt of `generate`."""
    checks: list[Difference | None] = field(default_factory=list)
    """One per output of `check`; None where every id is the target's own."""


def compare(expected: Answer, found: Sequence[int]) -> Difference | None:
    """The first difference, or None."""
    for position, (one, other) in enumerate(itertools.zip_longest(expected.ids, found)):
        if one != other:
            return Difference(position, one, other, expected.gaps[min(position, len(expected.gaps) - 1)])
    return None


def judge(
    model: str,
    *,
    generate: Sequence[str] = (),
    max_tokens: int = 128,
    check: Sequence[tuple[str, Sequence[int]]] = (),
    timeout_s: float = 600.0,
) -> Judgement:
    """Ask a new reference process."""
    outputs = [{"prompt": prompt, "ids": list(ids)} for prompt, ids in check]
    task = {"model": model, "max_tokens": max_tokens, "generate": list(generate), "check": outputs}
    command = [sys.executable, "-m", "tests.e2e.reference"]
    made = subprocess.run(
        command, input=json.dumps(task) + "\n", capture_output=True, text=True, timeout=timeout_s, cwd=REPO, check=False
    )
    assert made.returncode == 0, made.stderr
    result = json.loads(made.stdout)
    return Judgement(
        [Answer(**answer) for answer in result["answers"]],
        [None if each is None else Difference(**each) for each in result["checks"]],
    )


def assert_target_alone(model: str, *outputs: tuple[str, Sequence[int]]) -> None:
    """Each (prompt, output ids) is what the target alone would say, greedily."""
    for (prompt, ids), difference in zip(outputs, judge(model, check=outputs).checks, strict=True):
        assert difference is None or difference.near_tie, f"after {prompt[-40:]!r} and {len(ids)} tokens: {difference}"


class _Target:
    """Shares nothing with our engine."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        inputs = self._tokenizer(prompt, return_tensors="pt")
        made = self._model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        prompt_ids = inputs["input_ids"][0].tolist()
        best = [logits[0].topk(2).values for logits in made.logits]  # [2] float32 each
        gaps = [float(two[0] - two[1]) for two in best]
        return {"prompt_ids": prompt_ids, "ids": made.sequences[0, len(prompt_ids) :].tolist(), "gaps": gaps}

    def check(self, prompt: str, ids: list[int]) -> dict[str, Any] | None:
        prompt_ids = self._tokenizer(prompt)["input_ids"]
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
        for position, (found, row) in enumerate(zip(ids, logits, strict=True)):
            two = row.topk(2)
            if int(two.indices[0]) != found:
                gap = float(two.values[0] - two.values[1])
                return {"position": position, "expected": int(two.indices[0]), "found": found, "gap": gap}
        return None


def main() -> int:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    task = json.loads(sys.stdin.readline())
    target = _Target(task["model"])
    answers = [target.generate(prompt, task["max_tokens"]) for prompt in task["generate"]]
    checks = [target.check(each["prompt"], each["ids"]) for each in task["check"]]
    sys.stdout.write(json.dumps({"answers": answers, "checks": checks}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
