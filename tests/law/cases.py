"""What is asked of the services: every sampling parameter in turn and all together, every encoding, K from 0 to 4."""

from dataclasses import dataclass, replace
from typing import Any

from outrider.client import AcceptanceRule, Drafter, DraftLogprobs, Speculation, StructuredOutputs
from outrider.wire.requests.params import SamplingParams
from tests import grammars

VOCAB_SIZE = 8
PROMPT = (2, 3, 4, 3)
PREDICTIONS = {"": "?2", "schema": "[1", "choice": "12"}
"""By grammar, of cases that draft from one: likely enough that it is kept whole at times, under all their parameters.
`?` is an unknown token.
"""
NUM_ANSWERS = 1280
"""Of each case. `test_power.py` computes that every broken rule then shows with p < 1e-6."""
NUM_EVERYDAY = 416
"""Of each sound case where the slow tests are left out: all together pass a broken rule once in thirty at most."""
CHOICES_PER_CALL = 16
"""Half of what makes answers differ is the seed of the call, half is the choice under it."""
TOPK = 3
"""N of `topk` and, as the gateway's default, of `auto`: cuts off about a quarter of the draft's mass."""

# Without an end, all answers are equally long and the last tokens are as well tested as the first.
ENDLESS: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
STRUCTURED = {
    "schema": StructuredOutputs(json={"type": "array", "items": {"type": "integer"}}),
    "regex": StructuredOutputs(regex=r"[12]+(,[12]+)*\]?"),
    "choice": StructuredOutputs(choice=["1112", "12,1", "2[1]", "2,"]),
}
"""As they are asked for; a case's parameters have the names."""
GRAMMARS = {"schema": grammars.SCHEMA, "regex": grammars.REGEX, "choice": grammars.CHOICE}
"""The same as llguidance has them. Some answers to each end by themselves, and some tokens are all that may come."""
EVERYTHING: dict[str, Any] = {
    "max_tokens": 4,
    "temperature": 1.3,
    "top_k": 7,
    "top_p": 0.97,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {0: 0.5, 6: 1.0, 1: -0.7},
    "bad_words": ((1, 5), (3, 7)),
    "min_tokens": 2,
    "stop_token_ids": (7,),
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "nothing": ENDLESS,
    "temperature 0": {**ENDLESS, "temperature": 0.0},
    "temperature 0.7": {**ENDLESS, "temperature": 0.7},
    "temperature 1.5": {**ENDLESS, "temperature": 1.5},
    "top_k": {**ENDLESS, "top_k": 4},
    "top_p": {**ENDLESS, "top_p": 0.85},
    "min_p": {**ENDLESS, "min_p": 0.12},
    "repetition_penalty": {**ENDLESS, "repetition_penalty": 2.5},
    "presence_penalty": {**ENDLESS, "presence_penalty": 1.6},
    "frequency_penalty": {**ENDLESS, "frequency_penalty": 1.3},
    # A token that both models like is drafted, kept and drafted again: its penalty must grow within the round.
    "repeated drafts": {**ENDLESS, "frequency_penalty": 1.3, "logit_bias": {3: 2.0}},
    "negative penalties": {**ENDLESS, "presence_penalty": -0.8, "frequency_penalty": -0.6},
    "logit_bias": {**ENDLESS, "logit_bias": {1: -1.5, 2: 2.0}},
    "bad_words": {**ENDLESS, "bad_words": ((6,), (1, 1), (3, 7), (4, 3, 5))},
    "end of sequence": {"max_tokens": 4, "logit_bias": {0: 0.8}},
    "min_tokens": {"max_tokens": 4, "min_tokens": 2, "logit_bias": {0: 1.5}},
    "stop_token_ids": {**ENDLESS, "stop_token_ids": (5, 7)},
    "schema": {"max_tokens": 4, "grammar": "schema"},
    "regex": {"max_tokens": 4, "grammar": "regex"},
    "choice": {"max_tokens": 4, "grammar": "choice"},
    "schema, temperature 0": {"max_tokens": 4, "temperature": 0.0, "grammar": "schema"},
    # What the grammar forbids is among the best, and what it forces is penalised.
    "regex, cut": {"max_tokens": 4, "top_k": 3, "top_p": 0.9, "frequency_penalty": 0.8, "grammar": "regex"},
    "everything": EVERYTHING,
}


LENGTHS = (1, 2, 4)
"""K of groups for its own sake. It is 3 in the others."""
UNDER_FULL = ("nothing", "top_p", "repetition_penalty", "bad_words", "end of sequence", "min_tokens", "regex")
"""Parameters of each kind, for the suite of every day: each of them has its law tested under one kind at least, and
under more with the larger samples. At temperature 0 it is one answer, which tests of parity compare.
"""
UNDER_TOPK = ("presence_penalty", "temperature 1.5", "regex, cut", "everything")
UNDER_COUPLED = ("min_p", "stop_token_ids", "schema")
UNDER_OTHERS = {
    "ngram": ("temperature 0.7",),
    "bigram": ("top_k",),
    "tree": ("logit_bias", "choice"),
    "best tree": ("negative penalties",),
    "coupled tree": ("everything",),
    "coupled best tree": ("nothing",),
    "auto": ("nothing",),
    "K adapts": ("nothing",),
    "K adapts, auto": ("nothing",),
    "lengths": ("K = 1, everything",),
    "lenient": ("nothing",),
    "lookup": ("repeated drafts",),
    "unigram": ("nothing",),
    "ngram+model": ("frequency_penalty",),
    "prediction": ("schema",),
    "ngram&model": ("nothing",),
    "lookup&model": ("repeated drafts",),
    "two drafts": ("everything",),
    "draft of bigrams": ("everything",),
    "unreliable draft": ("nothing",),
    "eagle3": ("nothing",),
    "eagle3 tree": ("everything",),
    "medusa": ("everything",),
    "medusa tree": ("nothing",),
    "heads": ("nothing",),
    "lookahead": ("nothing",),
    "pass": ("nothing",),
    "dspark": ("nothing",),
    "peagle": ("nothing",),
    "encoder-decoder": ("everything",),
    "translated": ("everything",),
    "translated tree": ("nothing",),
}
UNDER_DRAFTERS = {
    "ngram": ("nothing", "schema", "everything"),
    "lookup": ("repeated drafts", "regex", "everything"),
    "unigram": ("nothing", "regex, cut", "everything"),
    "bigram": ("top_k", "choice", "everything"),
    "ngram+model": ("frequency_penalty", "choice", "everything"),
    "lookup+model": ("nothing", "schema", "everything"),
    "lookahead": ("nothing", "choice", "everything"),
    "lookahead+model": ("frequency_penalty", "schema", "everything"),
    "pass": ("nothing", "regex", "everything"),
    "prediction": ("nothing", "schema", "everything"),
    "prediction+model": ("repeated drafts", "choice", "everything"),
}
"""Who else than a draft worker alone makes drafts."""
UNDER_UNIONS = {
    "ngram&model": ("nothing", "frequency_penalty", "schema", "everything"),
    "lookup&model": ("repeated drafts", "choice", "everything"),
}
"""The same, of those who make them together."""
COUPLED_DRAFTERS = "coupled, drafters"
"""A group: what is said is the target's draw, whatever they guess."""


DRAFT_SERVICES = {"draft of bigrams": "bigram", "draft of n-grams": "ngram", "draft of lookups": "lookup"}
"""Groups whose drafts are made by a draft worker without a model: its drafter."""
BLOCK_HEADS = ("dflash", "dspark")
JOINED = ("eagle1", "mtp", "peagle")
SPARKS = {"dspark": "rnn", "dspark-vanilla": "vanilla", "dspark-gated": "gated"}
"""Groups whose drafts are made by DSpark, and the kind of its sequential head."""
OTHER_SPARKS = tuple(SPARKS)[1:]
HEADS = ("eagle3", "medusa", "pard", "heads", *BLOCK_HEADS, *JOINED, *OTHER_SPARKS)
"""Groups whose drafts are made by a head, or a model that fills masks; `heads` are Medusa's in the target itself. With
` tree` behind the name they are trees."""
ENCODER_DECODER = ("encoder-decoder", "coupled, encoder-decoder")
"""Groups whose pair is an encoder-decoder one: PROMPT is the source."""
ADAPTS = ("K adapts", "K adapts, ngram&model", "K adapts, auto")
"""Groups whose steps verify now more and now fewer drafts: in the last of them, of whoever promises more."""
TWO_DRAFTS = ("two drafts", "two drafts tree", "coupled, two drafts")
"""Groups for which two models draft into one tree."""
ONE_MODEL_TWICE = "two drafts of one model"
"""They say the same wherever they do not draw with numbers of their own."""
DRAFTED_FOR = "K adapts, drafted by lookup"
"""A group whose draft is drafted for: what it says after a token comes sooner or later by what that token is."""
TRANSLATED = ("translated", "translated tree", "coupled, translated")
"""Groups whose drafts are made by a model of another vocabulary, of which the target has a half."""
MEMORY_KINDS = ("indexer", "convolution", "coupled, indexer", "coupled, convolution")
"""Groups whose pair keeps more than keys and values (`tests.memory_kinds`). Answers are long enough for steps without
drafts, of an unreliable draft, between others; an indexer reads four of up to ten tokens.
"""
FEATURE_FAULTS = {"eagle3, stale rows": "stale", "eagle3, shifted rows": "shifted", "eagle3, missing rows": "missing"}
"""Groups whose rows of features are wrong, and how: what a law was computed from is free."""


@dataclass(frozen=True)
class Case:
    """One law to be tested."""

    group: str
    name: str
    params: SamplingParams
    speculation: Speculation
    first_seed: int = 0

    @property
    def slow(self) -> bool:
        """Tested with the larger samples alone."""
        some = {"full": UNDER_FULL, "topk": UNDER_TOPK, "coupled": UNDER_COUPLED, **UNDER_OTHERS}
        return self.name not in some.get(self.group, ())

    @property
    def id(self) -> str:
        return f"{self.group}: {self.name}"


def _group(group: str, speculation: Speculation, names: list[str]) -> list[Case]:
    return [Case(group, name, SamplingParams(**PARAMETERS[name]), speculation) for name in names]


def _lengths() -> list[Case]:
    """Every draft token may be used: max_tokens leaves room for K of them."""
    found = []
    for k in LENGTHS:
        for name in ("nothing", "everything"):
            params = replace(SamplingParams(**PARAMETERS[name]), max_tokens=max(4, k + 1))
            found.append(Case("lengths", f"K = {k}, {name}", params, Speculation(num_draft_tokens=k)))
    return found


def _cases() -> list[Case]:
    full = Speculation(num_draft_tokens=3, draft_logprobs=DraftLogprobs.FULL)
    topk = Speculation(num_draft_tokens=3, draft_logprobs=DraftLogprobs.TOPK, draft_topk=TOPK)
    auto = Speculation(num_draft_tokens=3, draft_logprobs=DraftLogprobs.AUTO)
    tree = Speculation(tree="3x2x1", draft_logprobs=DraftLogprobs.FULL)
    best_tree = replace(topk, num_draft_tokens=None, tree="best:6x3", explain=True)
    coupled_tree = Speculation(tree="2x2x2", acceptance=AcceptanceRule.COUPLED)
    coupled_best_tree = Speculation(tree="best:6x3", acceptance=AcceptanceRule.COUPLED, explain=True)
    mixed_tree = replace(tree, drafter=Drafter.NGRAM_MODEL)
    unions = {name: replace(full, drafter=Drafter(name), explain=name == "ngram&model") for name in UNDER_UNIONS}
    both = replace(full, drafter=Drafter.MODEL_AND_MODEL)
    coupled = Speculation(num_draft_tokens=3, acceptance=AcceptanceRule.COUPLED)
    off = Speculation(enabled=False)
    coupled_off = replace(coupled, enabled=False)
    some = ["nothing", "frequency_penalty", "everything"]
    several = ["temperature 0.7", "top_p", "min_p", "frequency_penalty"]
    drafters = {name: replace(full, drafter=Drafter(name), explain=name == "ngram") for name in UNDER_DRAFTERS}
    cases = [
        *_group("full", full, list(PARAMETERS)),
        *_group("topk", topk, list(PARAMETERS)),
        *_group("auto", auto, some),
        *_lengths(),
        *_group("off", off, some),
        *_group("coupled", coupled, [name for name in PARAMETERS if name != "temperature 0"]),
        *_group("coupled, ngram", replace(coupled, drafter=Drafter.NGRAM), ["repeated drafts", "schema"]),
        *(case for name, wish in drafters.items() for case in _group(name, wish, list(UNDER_DRAFTERS[name]))),
        *(case for name in ("ngram", "bigram") for case in _group(name, drafters[name], several)),
        *_group("coupled, off", coupled_off, ["everything"]),
        *_group("by token", full, ["everything", "regex, cut"]),
        *_group("lenient", replace(full, lenience=0.5), ["nothing", "frequency_penalty", "everything"]),
        *_group("draft of bigrams", full, ["nothing", "regex", "everything"]),
        *_group("draft of n-grams", full, ["schema", "everything"]),
        *_group("draft of lookups", full, ["regex", "everything"]),
        *_group("unreliable draft", replace(full, num_draft_tokens=2), some),
        # Too few of eagle3's drafts are kept where a cut leaves three ids and a grammar fewer.
        *_group("eagle3", full, [name for name in PARAMETERS if name != "regex, cut"]),
        *(case for head in HEADS[1:3] for case in _group(head, full, list(PARAMETERS))),
        *(case for head in HEADS[:3] for case in _group(f"{head} tree", tree, [*some, *GRAMMARS])),
        *(case for head in HEADS[:3] for case in _group(f"coupled, {head}", coupled, [*some, *GRAMMARS])),
        *(case for head in HEADS[:3] for case in _group(f"coupled, {head} tree", coupled_tree, some)),
        *_group("heads", replace(full, drafter=Drafter.HEADS), list(PARAMETERS)),
        *_group("coupled, heads", replace(coupled, drafter=Drafter.HEADS), some),
        *(case for group in FEATURE_FAULTS for case in _group(group, full, ["nothing", "everything"])),
        *_group("tree", tree, list(PARAMETERS)),
        *_group("best tree", best_tree, list(PARAMETERS)),
        *_group("coupled tree", coupled_tree, [*some, *GRAMMARS]),
        *(
            Case(COUPLED_DRAFTERS, name, SamplingParams(**EVERYTHING), replace(coupled, drafter=Drafter(name)))
            for name in ("auto", *drafters)
        ),
        *_group(ADAPTS[0], replace(full, num_draft_tokens="auto"), ["nothing", "everything"]),
        *_group("coupled best tree", coupled_best_tree, [*some, "choice"]),
        *_group("tree, ngram+model", mixed_tree, ["everything", "choice"]),
        *(case for head in BLOCK_HEADS for case in _group(head, full, list(PARAMETERS))),
        *(case for head in BLOCK_HEADS for case in _group(f"{head} tree", tree, [*some, *GRAMMARS])),
        *(case for head in BLOCK_HEADS for case in _group(f"coupled, {head}", coupled, [*some, *GRAMMARS])),
        *(case for head in BLOCK_HEADS for case in _group(f"coupled, {head} tree", coupled_tree, some)),
        *(case for head in JOINED for case in _group(head, full, [*some, "temperature 0", "schema", "choice"])),
        *(case for head in JOINED for case in _group(f"{head} tree", tree, some)),
        *(case for head in JOINED for case in _group(f"coupled, {head}", coupled, some)),
        *(case for head in OTHER_SPARKS for case in _group(head, full, ["nothing", "everything"])),
        *(case for head in OTHER_SPARKS for case in _group(f"{head} tree", tree, ["everything"])),
        *(case for head in OTHER_SPARKS for case in _group(f"coupled, {head}", coupled, ["everything"])),
        *_group(ENCODER_DECODER[0], full, [*some, "temperature 0", "repetition_penalty", "schema"]),
        *_group(ENCODER_DECODER[1], coupled, some),
        *(case for name, wish in unions.items() for case in _group(name, wish, list(UNDER_UNIONS[name]))),
        *(
            Case(COUPLED_DRAFTERS, name, SamplingParams(**EVERYTHING), replace(coupled, drafter=wish.drafter))
            for name, wish in unions.items()
        ),
        *_group("tree, ngram&model", replace(tree, drafter=Drafter.NGRAM_AND_MODEL), ["everything"]),
        *_group(TWO_DRAFTS[0], both, [*some, "temperature 0", "schema"]),
        *_group(TWO_DRAFTS[1], replace(tree, drafter=both.drafter), ["nothing", "everything"]),
        *_group(TWO_DRAFTS[2], replace(coupled, drafter=both.drafter), ["everything"]),
        *_group(ONE_MODEL_TWICE, both, ["nothing"]),
        *_group(ADAPTS[1], replace(unions["ngram&model"], num_draft_tokens="auto"), ["nothing"]),
        *_group(ADAPTS[2], replace(full, num_draft_tokens="auto", drafter=Drafter.AUTO), some),
        *_group(TRANSLATED[0], replace(full, num_draft_tokens=2), [*some, "temperature 0", "top_k", "schema", "regex"]),
        *_group(TRANSLATED[1], tree, some),
        *_group(TRANSLATED[2], replace(coupled, num_draft_tokens=2), [*some, "choice"]),
        *_group(DRAFTED_FOR, replace(full, num_draft_tokens="auto"), ["nothing"]),
        *(
            Case(group, "six tokens", SamplingParams(max_tokens=6, ignore_eos=True), wish)
            for group, wish in zip(MEMORY_KINDS, (full, full, coupled, coupled), strict=True)
        ),
    ]
    return [replace(case, first_seed=1_000_000 * index) for index, case in enumerate(cases)]


ALL_CASES = _cases()
"""Sound services; each must have its law."""
CASES = [case for case in ALL_CASES if not case.slow]
CASE = {case.id: case for case in ALL_CASES}
_NUM_MIXED = 5


def batches(cases: list[Case]) -> list[list[Case]]:
    """Cases that are drawn at the same time and meet in the services' batches: parameters, encodings and K mixed.

    `auto` is alone, so that its own load makes it change between whole and cut laws; `lenient`, so that its plain steps
    can be counted.
    """
    alone = (
        "auto",
        "lenient",
        *ADAPTS,
        DRAFTED_FOR,
        "by token",
        ONE_MODEL_TWICE,
        *DRAFT_SERVICES,
        "unreliable draft",
        *FEATURE_FAULTS,
        *MEMORY_KINDS,
    )
    of_head = {head: [case for case in cases if head_of(case.group) == head] for head in HEADS}
    together = (ENCODER_DECODER, TRANSLATED, TWO_DRAFTS)
    apart = (*alone, *(group for groups in together for group in groups))
    mixed = [case for case in cases if case.group not in apart and head_of(case.group) is None]
    return [
        *(mixed[i::_NUM_MIXED] for i in range(_NUM_MIXED)),
        *([case for case in cases if case.group == group] for group in alone),
        *of_head.values(),
        *([case for case in cases if case.group in groups] for groups in together),
    ]


def head_of(group: str) -> str | None:
    """Return which of HEADS makes a group's drafts."""
    name = group.removeprefix("coupled, ").removesuffix(" tree")
    return name if name in HEADS else None
