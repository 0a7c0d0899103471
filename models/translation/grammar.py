"""Write sentences of "En" together with their translations into "De", as many as are wanted, by one grammar for both.

What makes them a task for more than a word at a time: verbs stand last in De's subordinate clauses, and behind
auxiliaries; a topic put first turns subject and verb round; articles, adjectives and pronouns agree with a noun's
gender, number and case, pronouns with one that stands far before; and what an ambiguous word means is told by the
place that the sentence is about, which may stand at its other end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from models.translation.lexicon import NUM_DOMAINS, Lexicon, Noun, Verb

PLURAL = 3
"""Column of the plural in the tables of endings. The columns before it are the three genders."""


class Case(IntEnum):
    """Case of a noun in De, which is the row in the tables of endings."""

    NOMINATIVE = 0
    ACCUSATIVE = 1
    DATIVE = 2


THE = (("der", "die", "das", "die"), ("den", "die", "das", "die"), ("dem", "der", "dem", "den"))
STRONG = (("er", "e", "es", "e"), ("en", "e", "es", "e"), ("em", "er", "em", "en"))
"""Endings [case][column] of dies- and jed-, of einig- in the plural, and of an adjective after einig-."""
A = (("", "e", "", "e"), ("en", "e", "", "e"), ("em", "er", "em", "en"))
"""Endings [case][column] of ein- and kein-."""
WEAK = (("e", "e", "e", "en"), ("en", "e", "e", "en"), ("en", "en", "en", "en"))
"""Endings [case][column] of an adjective after der, dies- or jed-."""
MIXED = (("er", "e", "es", "en"), ("en", "e", "es", "en"), ("en", "en", "en", "en"))
"""Endings [case][column] of an adjective after ein- or kein-."""
WHICH = (("der", "die", "das", "die"), ("den", "die", "das", "die"), ("dem", "der", "dem", "denen"))
PRONOUNS = (("er", "sie", "es", "sie"), ("ihn", "sie", "es", "sie"), ("ihm", "ihr", "ihm", "ihnen"))

DETERMINERS = ("the", "the", "a", "this", "every", "no")
PLURAL_DETERMINERS = ("the", "some", "these", "no")
CONJUNCTIONS = (("because", "weil"), ("when", "wenn"), ("although", "obwohl"), ("while", "während"), ("if", "falls"))
REPORTING_VERBS = (("says", "sagt"), ("thinks", "glaubt"), ("knows", "weiß"), ("hopes", "hofft"))
PREPOSITIONS = (
    *(("with", "mit", Case.DATIVE), ("after", "nach", Case.DATIVE), ("from", "von", Case.DATIVE)),
    *(("for", "für", Case.ACCUSATIVE), ("without", "ohne", Case.ACCUSATIVE), ("against", "gegen", Case.ACCUSATIVE)),
)
TENSES = ("present", "present", "perfect", "future", "can")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Phrase:
    """A noun phrase in both languages, En and De."""

    en: str
    de: dict[Case, str]
    column: int
    """Column in the tables of endings: the gender of its noun, or PLURAL."""
    pronoun: str
    """Pronoun that stands for it in a later clause in En: it, or they."""

    @property
    def is_plural(self) -> bool:
        return self.column == PLURAL


@dataclass(frozen=True, slots=True)
class Clause:
    """What a clause says of its subject, in both languages."""

    en: str
    """The clause in En, without its subject."""
    finite: str
    """Finite verb of the clause in De, which agrees with the subject."""
    middle: str
    """Words of De between the finite verb and `end`."""
    end: str
    """Word of De that ends a main clause: an infinitive, a participle, or the prefix of the verb; empty if there is
    none."""
    joined: str
    """`end` and the finite verb as they stand at the end of a subordinate clause in De."""

    def main(self, subject: str, topic: str = "") -> str:
        """Return the clause as a main clause of De, whose verb is its second part.

        topic: words that come first, so that the subject comes after the verb; empty = the subject comes first.
        """
        first = f"{topic} {self.finite} {subject}" if topic else f"{subject} {self.finite}"
        return _join(first, self.middle, self.end)

    def subordinate(self, subject: str) -> str:
        return _join(subject, self.middle, self.joined)


class SentenceGrammar:
    """Writes random sentences of En with their translations into De, in words of a lexicon."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon = lexicon
        self._shares = {id(words): _zipf(len(words)) for words in self._all_words()}

    def pairs(self, seed: int) -> Iterator[tuple[str, str]]:
        """Yield pairs (sentence of En, its translation into De) without end. Each seed gives other pairs."""
        dice = random.Random(seed)
        while True:
            yield self.pair(dice)

    def pair(self, dice: random.Random) -> tuple[str, str]:
        """Return a random sentence of En and its translation into De."""
        domain = dice.randrange(NUM_DOMAINS)
        writer = _Writer(self, dice, domain)
        place = self._phrase_of(dice, dice.choice(self.lexicon.places[domain]), domain, "the", [])
        where = (f"in {place.en}", f"in {place.de[Case.DATIVE]}")
        shape = dice.random()
        if shape < 0.35:
            return writer.simple(where)
        if shape < 0.8:
            return writer.complex(where)
        return writer.reported(where)

    def noun_phrase(self, dice: random.Random, domain: int, depth: int = 0) -> Phrase:
        """Return a name, or a noun with a determiner, adjectives and at times a relative clause.

        domain: field of life, which decides what ambiguous words mean. depth: 0, or 1 within a relative clause, which
        gets no relative clause of its own.
        """
        if dice.random() < 0.15:
            name = self.choose(dice, self.lexicon.names)
            return Phrase(name, dict.fromkeys(Case, name), dice.randrange(2), "they")
        noun = self.choose(dice, self.lexicon.nouns)
        plural = dice.random() < 0.3
        determiner = dice.choice(PLURAL_DETERMINERS if plural else DETERMINERS)
        num_adjectives = dice.choice((0, 0, 1, 1, 2))
        adjectives = [self.choose(dice, self.lexicon.adjectives) for _ in range(num_adjectives)]
        phrase = self._phrase_of(dice, noun, domain, determiner, [(each.en, each.de) for each in adjectives], plural)
        if depth or dice.random() > 0.15:
            return phrase
        clause = self.clause(dice, domain, phrase, depth=1)
        about = clause.subordinate(WHICH[Case.NOMINATIVE][phrase.column])
        whole = {case: f"{text}, {about}," for case, text in phrase.de.items()}
        return Phrase(f"{phrase.en} that {clause.en}", whole, phrase.column, phrase.pronoun)

    def clause(self, dice: random.Random, domain: int, subject: Phrase, depth: int = 0) -> Clause:
        """Return a random clause about the subject.

        domain: field of life, which decides what ambiguous words mean. depth: 0, or 1 within a relative clause.
        """
        verb = self.choose(dice, self.lexicon.verbs)
        tense = dice.choice(TENSES)
        thing = self.noun_phrase(dice, domain, depth)
        adverb = self.choose(dice, self.lexicon.adverbs) if dice.random() < 0.3 else None
        is_denied = dice.random() < 0.15
        en_parts = [thing.en]
        de_parts = [thing.de[Case.DATIVE if verb.takes_dative else Case.ACCUSATIVE]]
        if dice.random() < 0.25:
            en, de, case = dice.choice(PREPOSITIONS)
            other = self.noun_phrase(dice, domain, 1)
            en_parts.append(f"{en} {other.en}")
            de_parts.append(f"{de} {other.de[case]}")
        if adverb is not None:
            en_parts.append(adverb.en)
            de_parts.insert(0, adverb.de)
        if is_denied:
            de_parts.append("nicht")
        verb_en = _english_verb(verb, tense, subject.is_plural, is_denied)
        finite, end, joined = _german_verb(verb, tense, subject.is_plural, domain)
        return Clause(_join(verb_en, *en_parts), finite, _join(*de_parts), end, joined)

    def choose(self, dice: random.Random, words: Sequence[T]) -> T:
        """Return one of the words at random. The first ones are the likeliest."""
        return dice.choices(words, cum_weights=self._shares[id(words)])[0]

    def _phrase_of(
        self,
        dice: random.Random,
        noun: Noun,
        domain: int,
        determiner: str,
        adjectives: Sequence[tuple[str, str]],
        plural: bool = False,
    ) -> Phrase:
        column = PLURAL if plural else noun.genders[domain].value
        en = _join(determiner, *(en for en, _ in adjectives), noun.en + "s" * plural)
        own = noun.plurals[domain] if plural else noun.de[domain]
        de = {}
        for case in Case:
            word = own + "n" if plural and case is Case.DATIVE and own[-1] not in "ns" else own
            article, endings = _german_determiner(determiner, case, column)
            de[case] = _join(article, *(stem + endings[case][column] for _, stem in adjectives), word)
        return Phrase(en, de, column, "they" if plural else "it")

    def _all_words(self) -> tuple[Sequence[object], ...]:
        own = self.lexicon
        return (own.nouns, own.verbs, own.adjectives, own.adverbs, own.names)


class _Writer:
    """Writes one sentence."""

    def __init__(self, grammar: SentenceGrammar, dice: random.Random, domain: int) -> None:
        self._grammar = grammar
        self._dice = dice
        self._domain = domain

    def simple(self, where: tuple[str, str]) -> tuple[str, str]:
        subject, clause = self._create_clause()
        if self._dice.random() < 0.5:
            topic = clause.main(subject.de[Case.NOMINATIVE], where[1])
            return _sentence(f"{where[0]} {subject.en} {clause.en}", topic)
        behind = Clause(clause.en, clause.finite, _join(clause.middle, where[1]), clause.end, clause.joined)
        return _sentence(f"{subject.en} {clause.en} {where[0]}", behind.main(subject.de[Case.NOMINATIVE]))

    def complex(self, where: tuple[str, str]) -> tuple[str, str]:
        """Return a sentence of two clauses. The second is about the first one's subject, as a pronoun, or about another
        subject.
        """
        subject, clause = self._create_clause()
        en_conjunction, de_conjunction = self._dice.choice(CONJUNCTIONS)
        nominative = subject.de[Case.NOMINATIVE]
        if subject.pronoun == "it" or subject.is_plural:
            second = self._grammar.clause(self._dice, self._domain, subject)
            en_second = f"{subject.pronoun} {second.en}"
            de_second = second.subordinate(PRONOUNS[Case.NOMINATIVE][subject.column])
        else:
            other, second = self._create_clause()
            en_second = f"{other.en} {second.en}"
            de_second = second.subordinate(other.de[Case.NOMINATIVE])
        if self._dice.random() < 0.5:
            first = clause.main(nominative, where[1])
            return _sentence(
                f"{where[0]} {subject.en} {clause.en}, {en_conjunction} {en_second}",
                f"{first}, {de_conjunction} {de_second}",
            )
        return _sentence(
            f"{subject.en} {clause.en}, {en_conjunction} {en_second} {where[0]}",
            f"{clause.main(nominative)}, {de_conjunction} {_before_verb(de_second, second.joined, where[1])}",
        )

    def reported(self, where: tuple[str, str]) -> tuple[str, str]:
        name = self._grammar.choose(self._dice, self._grammar.lexicon.names)
        en_says, de_says = self._dice.choice(REPORTING_VERBS)
        subject, clause = self._create_clause()
        inside = clause.subordinate(subject.de[Case.NOMINATIVE])
        return _sentence(
            f"{where[0]} {name} {en_says} that {subject.en} {clause.en}",
            f"{where[1]} {de_says} {name}, dass {inside}",
        )

    def _create_clause(self) -> tuple[Phrase, Clause]:
        subject = self._grammar.noun_phrase(self._dice, self._domain)
        return subject, self._grammar.clause(self._dice, self._domain, subject)


def _german_determiner(determiner: str, case: Case, column: int) -> tuple[str, Sequence[Sequence[str]]]:
    """Return the article, and the table of what adjectives behind it end with."""
    match determiner:
        case "the":
            return THE[case][column], WEAK
        case "this" | "these":
            return "dies" + STRONG[case][column], WEAK
        case "every":
            return "jed" + STRONG[case][column], WEAK
        case "some":
            return "einig" + STRONG[case][column], STRONG
        case "no":
            return "kein" + A[case][column], MIXED
        case "a":
            return "ein" + A[case][column], MIXED
    raise AssertionError(f"no article for {determiner}")


def _english_verb(verb: Verb, tense: str, is_plural: bool, is_denied: bool) -> str:
    match tense:
        case "present" if is_denied:
            return f"{'do' if is_plural else 'does'} not {verb.en}"
        case "present":
            return verb.en if is_plural else verb.en + "s"
        case "perfect":
            return _join("have" if is_plural else "has", "not" * is_denied, verb.en + "ed")
    return _join("will" if tense == "future" else "can", "not" * is_denied, verb.en)


def _german_verb(verb: Verb, tense: str, is_plural: bool, domain: int) -> tuple[str, str, str]:
    """Return the finite verb, what closes the clause, and both as they stand last in a subordinate clause."""
    stem = verb.stems[domain]
    changed = verb.changed[domain]
    infinitive = f"{verb.prefix}{stem}en"
    participle = f"{verb.prefix}ge{stem}t"
    if tense == "present":
        finite = f"{stem}en" if is_plural else f"{changed}t"
        return finite, verb.prefix, verb.prefix + finite
    auxiliaries = {"perfect": ("hat", "haben"), "future": ("wird", "werden"), "can": ("kann", "können")}
    finite = auxiliaries[tense][is_plural]
    end = participle if tense == "perfect" else infinitive
    return finite, end, f"{end} {finite}"


def _before_verb(clause: str, joined: str, addition: str) -> str:
    """Put something into a subordinate clause, before the verb that ends it."""
    return _join(clause.removesuffix(joined), addition, joined)


def _join(*parts: str) -> str:
    return " ".join(part.strip() for part in parts if part.strip())


def _sentence(en: str, de: str) -> tuple[str, str]:
    return _finished(en), _finished(de)


def _finished(text: str) -> str:
    text = text.rstrip(",").replace(",,", ",")
    return text[:1].upper() + text[1:] + "."


def _zipf(count: int) -> list[float]:
    """Return sums of shares that fall with the square root of a word's rank: rare words are still seen."""
    total = 0.0
    sums = list[float]()
    for rank in range(1, count + 1):
        total += rank**-0.5
        sums.append(total)
    return sums
