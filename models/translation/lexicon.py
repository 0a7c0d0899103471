"""Make the two vocabularies of the translation pair: invented words, the same for a seed, and how each is translated.

Three words in five of "De" come from those of "En" by a shift of sounds, as German's from those of its cousins; the
rest have to be known. Nouns have a gender, which their ending tells of some alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

SHIFTED_SHARE = 0.6
"""Share of words of De that come from their En word by a shift of sounds, and can so be told from its spelling."""
NUM_DOMAINS = 3
"""Number of fields of life. The field of a text decides what its ambiguous words mean."""

_EN_ONSETS = (*"bdfghklmnprstvw", "bl", "dr", "fl", "gr", "pl", "sn", "st", "th", "tr")
_EN_VOWELS = (*"aeiouaeio", "ea", "oo")
_EN_CODAS = ("", "", *"nrltkmpd", "nd", "rt", "lk")
_DE_ONSETS = (*"bfghklmnrwz", "bl", "br", "fl", "gl", "kn", "pf", "sch", "schl", "sp", "st", "tr", "zw")
_DE_VOWELS = (*"aeiouäöü", "ei", "au", "ie")
_DE_CODAS = ("", *"nrlms", "ch", "ck", "ng", "rz", "lt", "tz")
_SHIFTS = (
    *(("th", "d"), ("ea", "ei"), ("oo", "u"), ("sn", "schn"), ("dr", "tr"), ("pl", "pfl")),
    *(("p", "pf"), ("t", "z"), ("d", "t"), ("k", "ch"), ("v", "b")),
)
"""Each sound of En is looked for in this order, and what none of them names stays."""


class Gender(Enum):
    """Gender of a noun in De. Its value is its column in the tables of endings."""

    MASCULINE = 0
    FEMININE = 1
    NEUTER = 2


@dataclass(frozen=True, slots=True)
class Noun:
    """A noun of En with its translations. Its plural in En ends with s."""

    en: str
    de: tuple[str, ...]
    """Singular in De, one for each domain (field of life). They are all the same unless the noun is ambiguous."""
    genders: tuple[Gender, ...]
    """Gender in De of each entry of `de`."""
    plurals: tuple[str, ...]
    """Plural in De of each entry of `de`."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A transitive verb of En with its translations. Its past participle in En ends with ed."""

    en: str
    stems: tuple[str, ...]
    """Stem in De, one for each domain (field of life). They are all the same unless the verb is ambiguous."""
    changed: tuple[str, ...]
    """Stem in the third person singular for each entry of `stems`. In strong verbs it has another vowel."""
    prefix: str
    """Separable prefix in De, which stands at the end of a main clause; empty for most verbs."""
    takes_dative: bool


@dataclass(frozen=True, slots=True)
class Word:
    """An adjective or adverb. It has one form in En; in De an adjective takes endings."""

    en: str
    de: str


@dataclass(frozen=True, slots=True)
class Lexicon:
    """All words of both languages, the commonest first."""

    nouns: Sequence[Noun]
    verbs: Sequence[Verb]
    adjectives: Sequence[Word]
    adverbs: Sequence[Word]
    names: Sequence[str]
    """Names of persons, which are the same in both languages."""
    places: Sequence[Sequence[Noun]]
    """Nouns of places, one list for each domain (field of life). The place in a sentence tells which domain it is
    about."""

    @classmethod
    def make(cls, seed: int = 0) -> Lexicon:
        maker = _Maker(random.Random(seed))
        nouns = [maker.noun(is_ambiguous=number % 8 == 7) for number in range(128)]
        verbs = [maker.verb(is_ambiguous=number % 8 == 7) for number in range(48)]
        adjectives = [maker.word() for _ in range(40)]
        adverbs = [maker.word() for _ in range(16)]
        names = [maker.english(2).capitalize() for _ in range(16)]
        places = list[list[Noun]]()
        for _ in range(NUM_DOMAINS):
            places.append([maker.noun(is_ambiguous=False) for _ in range(8)])
        return cls(nouns, verbs, adjectives, adverbs, names, places)


class _Maker:
    """Makes words that are not there yet."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._known: set[str] = set()

    def english(self, num_syllables: int) -> str:
        return self._new(lambda: self._spelt(num_syllables, _EN_ONSETS, _EN_VOWELS, _EN_CODAS))

    def german(self, english: str) -> str:
        if self._dice.random() < SHIFTED_SHARE and (shifted := shift(english)) not in self._known:
            self._known.add(shifted)
            return shifted
        num_syllables = self._dice.choice((1, 2, 2))
        return self._new(lambda: self._spelt(num_syllables, _DE_ONSETS, _DE_VOWELS, _DE_CODAS))

    def word(self) -> Word:
        english = self.english(self._dice.choice((1, 2)))
        return Word(english, self.german(english))

    def noun(self, *, is_ambiguous: bool) -> Noun:
        english = self.english(self._dice.choice((1, 2, 2)))
        senses = [self._german_noun(english) for _ in range(2 if is_ambiguous else 1)]
        own = [senses[sense] for sense in self._senses(len(senses))]
        return Noun(english, *zip(*own, strict=True))

    def verb(self, *, is_ambiguous: bool) -> Verb:
        english = self.english(self._dice.choice((1, 2)))
        stems = [self.german(english).rstrip("e") for _ in range(2 if is_ambiguous else 1)]
        changed = [_changed(stem) if self._dice.random() < 0.3 else stem for stem in stems]
        senses = self._senses(len(stems))
        prefix = self._dice.choice(("ab", "an", "auf", "aus", "vor", "zu")) if self._dice.random() < 0.2 else ""
        own = (tuple(stems[sense] for sense in senses), tuple(changed[sense] for sense in senses))
        return Verb(english, *own, prefix, self._dice.random() < 0.2)

    def _senses(self, count: int) -> list[int]:
        """Return a sense for each domain, each of them at least once."""
        senses = [*range(count), *(self._dice.randrange(count) for _ in range(NUM_DOMAINS - count))]
        self._dice.shuffle(senses)
        return senses

    def _german_noun(self, english: str) -> tuple[str, Gender, str]:
        stem = self.german(english)
        ending = self._dice.choice(("", "", "", "e", "er", "ung"))
        genders = {"e": Gender.FEMININE, "er": Gender.MASCULINE, "ung": Gender.FEMININE}
        gender = genders.get(ending) or self._dice.choice(list(Gender))
        plural = {"e": "n", "er": "", "ung": "en"}.get(ending) or self._dice.choice(("e", "en", "er", "s"))
        singular = (stem.rstrip("e") + ending if ending else stem).capitalize()
        return singular, gender, singular + ("" if ending == "er" else plural)

    def _spelt(self, num_syllables: int, onsets: Sequence[str], vowels: Sequence[str], codas: Sequence[str]) -> str:
        dice = self._dice
        parts = [dice.choice(onsets) + dice.choice(vowels) + dice.choice(codas) for _ in range(num_syllables)]
        return "".join(parts)

    def _new(self, spell: Callable[[], str]) -> str:
        while (word := spell()) in self._known or len(word) < 3:
            pass
        self._known.add(word)
        return word


def shift(english: str) -> str:
    """Return the word of De that comes from a word of En by the shift of sounds."""
    found = ""
    at = 0
    while at < len(english):
        sound, shifted = next((pair for pair in _SHIFTS if english.startswith(pair[0], at)), (english[at], english[at]))
        found = found + shifted
        at = at + len(sound)
    return found


def _changed(stem: str) -> str:
    """Return a strong verb's stem of the third person: its last a, o or u as an umlaut, its last e as an i."""
    for at in range(len(stem) - 1, -1, -1):
        if stem[at] in "aoue":
            return stem[:at] + {"a": "ä", "o": "ö", "u": "ü", "e": "i"}[stem[at]] + stem[at + 1 :]
    return stem
