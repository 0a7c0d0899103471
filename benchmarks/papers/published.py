"""The numbers of Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023
(arXiv 2211.17192), as they are printed there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Theory:
    """A row of Table 1: drafts that cost nothing."""

    alpha: float
    gamma: int
    operations: float
    speed: float


TABLE_1 = (
    Theory(0.6, 2, 1.53, 1.96),
    Theory(0.7, 3, 1.58, 2.53),
    Theory(0.8, 2, 1.23, 2.44),
    Theory(0.8, 5, 1.63, 3.69),
    Theory(0.9, 2, 1.11, 2.71),
    Theory(0.9, 10, 1.60, 6.86),
)


@dataclass(frozen=True)
class Speed:
    """A row of Table 4, of which Table 2 is a part: T5-XXL (11B) on one TPU-v4, one answer at a time."""

    task: str
    draft: str
    temperature: float
    gamma: int
    alpha: float
    c: float
    expected: float
    measured: float


ENDE, CNNDM = "English to German", "CNN/DM summaries"
SMALL, BASE, LARGE = "T5-small (77M)", "T5-base (250M)", "T5-large (800M)"
TABLE_4 = (
    Speed(ENDE, SMALL, 0, 7, 0.75, 0.02, 3.2, 3.4),
    Speed(ENDE, BASE, 0, 7, 0.80, 0.04, 3.3, 2.8),
    Speed(ENDE, LARGE, 0, 7, 0.82, 0.11, 2.5, 1.7),
    Speed(ENDE, SMALL, 1, 7, 0.62, 0.02, 2.3, 2.6),
    Speed(ENDE, BASE, 1, 5, 0.68, 0.04, 2.4, 2.4),
    Speed(ENDE, LARGE, 1, 3, 0.71, 0.11, 2.0, 1.4),
    Speed(CNNDM, SMALL, 0, 5, 0.65, 0.02, 2.4, 3.1),
    Speed(CNNDM, BASE, 0, 5, 0.73, 0.04, 2.6, 3.0),
    Speed(CNNDM, LARGE, 0, 3, 0.74, 0.11, 2.0, 2.2),
    Speed(CNNDM, SMALL, 1, 5, 0.53, 0.02, 1.9, 2.3),
    Speed(CNNDM, BASE, 1, 3, 0.55, 0.04, 1.8, 2.2),
    Speed(CNNDM, LARGE, 1, 3, 0.56, 0.11, 1.6, 1.7),
)


@dataclass(frozen=True)
class Alpha:
    """A cell pair of Table 3, over 10,000 tokens of the target."""

    target: str
    drafter: str
    greedy: float
    """At temperature 0."""
    sampled: float
    """At temperature 1."""


_GPT, _ENDE, _CNNDM = "GPT-like (97M)", "T5-XXL, English to German", "T5-XXL, CNN/DM summaries"
_LAMDA = "LaMDA (137B), top 40"
TABLE_3 = (
    Alpha(_GPT, "unigram", 0.03, 0.03),
    Alpha(_GPT, "bigram", 0.05, 0.05),
    Alpha(_GPT, "GPT-like (6M)", 0.88, 0.89),
    Alpha(_ENDE, "unigram", 0.08, 0.07),
    Alpha(_ENDE, "bigram", 0.20, 0.19),
    Alpha(_ENDE, SMALL, 0.75, 0.62),
    Alpha(_ENDE, BASE, 0.80, 0.68),
    Alpha(_ENDE, LARGE, 0.82, 0.71),
    Alpha(_CNNDM, "unigram", 0.13, 0.08),
    Alpha(_CNNDM, "bigram", 0.23, 0.16),
    Alpha(_CNNDM, SMALL, 0.65, 0.53),
    Alpha(_CNNDM, BASE, 0.73, 0.55),
    Alpha(_CNNDM, LARGE, 0.74, 0.56),
    Alpha(_LAMDA, "LaMDA (100M)", 0.61, 0.57),
    Alpha(_LAMDA, "LaMDA (2B)", 0.71, 0.71),
    Alpha(_LAMDA, "LaMDA (8B)", 0.75, 0.74),
)

LENIENCES = (1.0, 0.5, 0.3, 0.1)


@dataclass(frozen=True)
class Lenient:
    """A row of Table 5 or of the text beside it, English to German, by LENIENCES."""

    drafter: str
    temperature: float
    alpha: tuple[float, ...]
    speed: tuple[float, ...] | None = None


TABLE_5 = (
    Lenient("unigram", 1, (0.07, 0.10, 0.11, 0.16)),
    Lenient("bigram", 1, (0.19, 0.23, 0.25, 0.32)),
    Lenient(SMALL, 1, (0.62, 0.71, 0.76, 0.84), (2.5, 3.1, 3.6, 5.0)),
    Lenient(BASE, 1, (0.68, 0.80, 0.83, 0.90)),
    Lenient(SMALL, 0, (0.75, 0.75, 0.80, 0.87), (3.3, 3.3, 3.9, 4.9)),
)
