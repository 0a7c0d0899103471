"""What was measured for the paper's tables, as it lies in `benchmarks/results/papers-*.json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.passes import Ratio
from outrider.lab.tuning.costs import Cost

NAME = "papers"
GREEDY, SAMPLED = TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Law:
    """How one drafter's law compares with the target's at one temperature, at the target's own tokens."""

    drafter: str
    temperature: float
    alpha: float
    error: float | None
    """Half the width of its 95 % interval over prompts; None of one prompt."""
    lenient: Mapping[float, float]
    """alpha by lenience, 1 included."""

    @classmethod
    def of(cls, row: Mapping[str, Any], drafter: str) -> Self:
        """Read a row of `outrider.lab.models.alpha`."""
        lenient = {each["lenience"]: each["mean"] for each in row["lenient"]}
        return cls(drafter, row["setting"]["temperature"], row["alpha"]["mean"], row["alpha"]["error"], lenient)


@dataclass(frozen=True)
class TaskLaws:
    """A target's text, and its drafters there."""

    task: str
    target: str
    counted: str
    """What unigram and bigram are counted in."""
    num_tokens: Mapping[float, int]
    """Of the target, by temperature."""
    laws: Sequence[Law]
    """Of a temperature in the paper's order, the worst first."""

    def law(self, drafter: str, temperature: float) -> Law:
        return next(each for each in self.laws if (each.drafter, each.temperature) == (drafter, temperature))

    def at(self, temperature: float) -> list[Law]:
        return [law for law in self.laws if law.temperature == temperature]


@dataclass(frozen=True)
class Arm:
    """The answers with one gamma, or plain ones."""

    gamma: int
    """0 for plain decoding."""
    lenience: float
    answers: Sequence[Sequence[tuple[int, float]]]
    """Tokens and seconds of whole answers, prompts included: by prompt, one a repetition."""
    decoded_per_s: float
    """Tokens per second of all answers together, from the end of each one's first round: without prompts."""
    num_passes: int
    """Steps of the target, prompts left out."""
    num_drafted: int
    full_round: float | None
    """Mean tokens of rounds with all gamma drafts, before an answer's end cuts them; None for plain decoding."""
    cost: Cost
    """Of a round."""

    @property
    def num_tokens(self) -> int:
        return sum(number for own in self.answers for number, _ in own)

    @property
    def answer_s(self) -> float:
        """Mean time of an answer."""
        return statistics.fmean(seconds for own in self.answers for _, seconds in own)

    def operations(self, c: float) -> float:
        """Return the operations a token over those of plain decoding. c: the draft's a token over the target's."""
        return (self.num_passes + (1.0 + c) * self.num_drafted) / self.num_tokens


@dataclass(frozen=True)
class Study:
    """Speeds at one temperature."""

    temperature: float
    draft_step_s: float
    """A plain step of the draft, served by itself."""
    arms: Sequence[Arm]
    """The first is plain decoding."""

    @property
    def plain(self) -> Arm:
        return self.arms[0]

    @property
    def step_s(self) -> float:
        """A plain step of the target."""
        return self.plain.cost.verify_s

    @property
    def c(self) -> float:
        return self.draft_step_s / self.step_s

    def exact(self) -> list[Arm]:
        """Return the arms with drafts and without lenience."""
        return [arm for arm in self.arms[1:] if arm.lenience == 1.0]

    def speed(self, arm: Arm) -> Ratio:
        """Return the tokens per second of all answers together, over those of plain decoding."""
        pairs = zip(arm.answers, self.plain.answers, strict=True)
        return Ratio.of([[(*mine, *other) for mine, other in zip(*pair, strict=True)] for pair in pairs], _together)

    def decoding_speed(self, arm: Arm) -> float:
        """Return the speed over plain decoding without prompts, which no draft shortens."""
        return arm.decoded_per_s / self.plain.decoded_per_s

    def fastest(self) -> Arm:
        """Return the fastest of `exact`."""
        return max(self.exact(), key=lambda arm: self.speed(arm).middle)


def _together(answers: NDArray[np.float64]) -> float:
    """answers: [N, 4], tokens and seconds, and tokens and seconds of plain ones."""
    tokens, seconds, plain_tokens, plain_seconds = answers.sum(axis=0)
    return float(tokens / seconds / (plain_tokens / plain_seconds))


@dataclass(frozen=True)
class PairSpeeds:
    """A target and a draft, served."""

    task: str
    target: str
    draft: str
    target_parameters: int
    draft_parameters: int
    studies: Sequence[Study]

    @property
    def operations_ratio(self) -> float:
        """Return the draft's operations a token over the target's, the paper's c with a hat: two for each parameter."""
        return self.draft_parameters / self.target_parameters


@dataclass(frozen=True)
class Measured:
    """A file of results."""

    tasks: Sequence[TaskLaws]
    pairs: Sequence[PairSpeeds]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave, other keys beside it."""
        return cls([_task(each) for each in values["tasks"]], [_pair(each) for each in values["pairs"]])

    def alpha(self, pair: PairSpeeds, temperature: float) -> float:
        """Return the alpha of the pair's laws."""
        (task,) = (each for each in self.tasks if each.task == pair.task)
        return task.law(pair.draft, temperature).alpha


def _task(values: Mapping[str, Any]) -> TaskLaws:
    laws = [Law(**{**each, "lenient": _by_number(each["lenient"])}) for each in values["laws"]]
    return TaskLaws(**{**values, "laws": laws, "num_tokens": _by_number(values["num_tokens"])})


def _by_number(values: Mapping[str, Any]) -> dict[float, Any]:
    return {float(key): value for key, value in values.items()}


def _pair(values: Mapping[str, Any]) -> PairSpeeds:
    studies = [Study(**{**each, "arms": [_arm(arm) for arm in each["arms"]]}) for each in values["studies"]]
    return PairSpeeds(**{**values, "studies": studies})


def _arm(values: Mapping[str, Any]) -> Arm:
    return Arm(**{**values, "cost": Cost(**values["cost"])})


def newest(folder: Path) -> Path | None:
    """Return the newest stored measurement of a folder, by its date; None where there is none."""
    return max(folder.glob(f"{NAME}-*.json"), default=None)


def read(path: Path) -> tuple[Measured, dict[str, str]]:
    """Return what was measured, and the facts of the measurement: command, date, machine."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return Measured.of(values), {key: value for key, value in values.items() if isinstance(value, str)}
