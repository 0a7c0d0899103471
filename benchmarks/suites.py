"""The served comparisons as data: pairs, ways to speculate and prompts. `benchmarks.comparison` runs them.

A suite is a function of its options that returns a `Suite`; its docstring is its help. A new one is a function here and
a row in SUITES.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import (
    DEMO_DRAFT,
    DEMO_EAGLE3,
    DEMO_MEDUSA,
    DEMO_PASS,
    DEMO_TARGET,
    REPO,
    dev_prompts,
    widened,
)
from benchmarks.comparison import (
    PAIR,
    PLAIN,
    Arm,
    Cell,
    Expectation,
    Suite,
    System,
    per_full_round,
    per_pass,
    speed,
)
from outrider.client import AcceptanceRule, Drafter, Speculation, StructuredOutputs

PROMPT_TOKENS = 512
"""Tokens of a prompt at most, its last ones."""
NUM_DRAFT_TOKENS = 4
"""K, where it is fixed."""
NO_DRAFTS = Arm(Speculation(enabled=False))
MODEL = "model"
AUTO = "auto"


def drafting(drafter: Drafter | str | None = None, **options: Any) -> Arm:
    """Return an arm that drafts so, on the only system."""
    return Arm(Speculation(drafter=drafter, **options))


def settings(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return what all workers of the suites are given: no prefix is found again."""
    return {"dtype": options.dtype, "prefix_caching": False, **more}


def wide_pair(options: argparse.Namespace, **target: Any) -> dict[str, System]:
    """Return the demo pair with its target widened as the only system. target: more of its settings."""
    common = settings(options)
    model = str(widened(options.size, options.dtype))
    return {PAIR: System({"model": model, **common, **target}, {"model": str(DEMO_DRAFT), **common})}


def prompts_of(options: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of the first held-out prompts."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    return [tokenizer.encode(text).ids[-PROMPT_TOKENS:] for text in dev_prompts(options.prompts)]


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return every temperature at every number of answers at once."""
    cells = list[Cell]()
    for temperature in options.temperatures:
        cells += [Cell(temperature, concurrency) for concurrency in options.concurrency]
    return cells


def suite_of(
    options: argparse.Namespace, title: str, systems: Mapping[str, System], arms: Mapping[str, Arm], **more: Any
) -> Suite:
    """Return a suite on the held-out prompts with the options' cells and lengths. more: other fields of `Suite`."""
    fields: dict[str, Any] = {
        "prompts": prompts_of(options),
        "cells": cells_of(options),
        "max_tokens": options.max_tokens,
        "repetitions": options.repetitions,
        "note": f"The demo pair, its target WIDENED to {options.size}, {options.dtype}, as `outrider up` places it.",
    }
    return Suite(title, systems, arms, **{**fields, **more})


def pays(options: argparse.Namespace) -> Suite:
    """Plain decoding, K fixed and the default, by temperature and load."""
    arms = {PLAIN: NO_DRAFTS, "K = 5": drafting(num_draft_tokens=5), AUTO: drafting()}
    return suite_of(options, "Does speculation pay", wide_pair(options), arms, positions=5)


def rules(options: argparse.Namespace) -> Suite:
    """Acceptance rules on the same drafts, by tokens of full rounds. Lenience accepts no fewer than the exact rule."""
    common = settings(options)
    systems = {PAIR: System({"model": str(DEMO_TARGET), **common}, {"model": str(DEMO_DRAFT), **common})}
    exact = "rejection"
    lenient = "lenience 0.5"
    of_rule: dict[str, dict[str, Any]] = {
        exact: {},
        "rejection by token": {"lenience": 1 - 1e-6},  # the rule under lenience, and next to none of it
        "coupled": {"acceptance": AcceptanceRule.COUPLED},
        lenient: {"lenience": 0.5},
    }
    arms = {name: drafting(num_draft_tokens=NUM_DRAFT_TOKENS, **rule) for name, rule in of_rule.items()}
    return suite_of(
        options,
        "What the acceptance rules accept",
        systems,
        arms,
        bases=(),
        per_pass_bases=(exact,),
        expectations=[Expectation(lenient, exact, per_full_round, 1.0)],
        note=f"The demo pair, {options.dtype}.",
    )


def trees(options: argparse.Namespace) -> Suite:
    """Trees of drafts beside the chains that are as deep and those that have as many tokens verified."""
    shapes = ("4x2x1", "2x2x2", "best:12x4", "best:16x6")
    arms = {PLAIN: NO_DRAFTS}
    for k in (3, 4, 6, 12, 16):
        arms[f"chain of {k}"] = drafting(num_draft_tokens=k)
    for shape in shapes:
        arms[f"tree {shape}"] = drafting(tree=shape)
    bases = (PLAIN, "chain of 3", "chain of 4")
    return suite_of(options, "Trees of drafts against chains", wide_pair(options), arms, bases=bases)


def lookahead(options: argparse.Namespace) -> Suite:
    """Lookahead decoding and PaSS beside a chain and n-grams."""
    from benchmarks.widen_head import widen_embeddings

    embeddings = kept_folder("pass")
    widen_embeddings(DEMO_PASS, DEMO_TARGET, widened(options.size, options.dtype), embeddings)
    arms = {PLAIN: NO_DRAFTS}
    for drafter in (Drafter.MODEL, Drafter.NGRAM, Drafter.LOOKAHEAD, Drafter.PASS):
        arms[str(drafter.value)] = drafting(drafter)
    systems = wide_pair(options, lookahead="5,4,5", lookahead_embeddings=str(embeddings))
    return suite_of(options, "Lookahead decoding and PaSS", systems, arms)


def unions(options: argparse.Namespace) -> Suite:
    """Two drafters in one tree beside each alone and one after the other. A union makes no fewer tokens a pass."""
    arms = {PLAIN: NO_DRAFTS}
    for own in ("ngram", "lookup"):
        for name in (own, f"{own}+model", f"{own}&model"):
            arms[name] = drafting(name)
            arms[f"{name}, K = {NUM_DRAFT_TOKENS}"] = drafting(name, num_draft_tokens=NUM_DRAFT_TOKENS)
    arms[f"model, K = {NUM_DRAFT_TOKENS}"] = drafting(MODEL, num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = list[Expectation]()
    for own in ("ngram", "lookup"):
        for part in (own, MODEL):
            union, alone = f"{own}&model, K = {NUM_DRAFT_TOKENS}", f"{part}, K = {NUM_DRAFT_TOKENS}"
            expected.append(Expectation(union, alone, per_pass, 1.0))
    return suite_of(options, "Several drafters in one tree", wide_pair(options), arms, expectations=expected)


def heads(options: argparse.Namespace) -> Suite:
    """EAGLE-3 and Medusa heads beside the demo draft: acceptance by position, tokens a pass, speed.

    Each draft has a target of its own: a target computes hidden states for every head that is registered there.
    """
    from benchmarks.widen_head import widen_head

    target = widened(options.size, options.dtype)
    folders = dict[str, Path]()
    for name, head in (("eagle3", DEMO_EAGLE3), ("medusa", DEMO_MEDUSA)):
        folders[name] = kept_folder(name)
        widen_head(head, DEMO_TARGET, target, folders[name])
    common = settings(options, kv_cache_tokens=16_384)
    base = {"model": str(target), **common}
    eagle3, medusa, inside = "EAGLE-3", "Medusa", "Medusa in the target"
    systems = {
        PAIR: System(base, {"model": str(DEMO_DRAFT), **common}),
        eagle3: System(base, {"model": str(folders["eagle3"]), **common}),
        medusa: System({**base, "heads": str(folders["medusa"])}, {"model": str(folders["medusa"]), **common}),
    }
    arms = {PLAIN: NO_DRAFTS}
    ways = {
        MODEL: (PAIR, Drafter.MODEL),
        "ngram": (PAIR, Drafter.NGRAM),
        eagle3: (eagle3, Drafter.MODEL),
        f"ngram+{eagle3}": (eagle3, Drafter.NGRAM_MODEL),
        medusa: (medusa, Drafter.MODEL),
        inside: (medusa, Drafter.HEADS),
    }
    for name, (system, drafter) in ways.items():
        fixed = Speculation(drafter=drafter, num_draft_tokens=NUM_DRAFT_TOKENS)
        arms[f"{name}, K = {NUM_DRAFT_TOKENS}"] = Arm(fixed, system)
        arms[name] = Arm(Speculation(drafter=drafter), system)
    return suite_of(
        options,
        "Draft heads beside a draft model",
        systems,
        arms,
        bases=(PLAIN, MODEL),
        per_pass_bases=(f"{MODEL}, K = {NUM_DRAFT_TOKENS}",),
        positions=NUM_DRAFT_TOKENS,
        expectations=[
            Expectation(f"{eagle3}, K = {NUM_DRAFT_TOKENS}", f"{MODEL}, K = {NUM_DRAFT_TOKENS}", per_pass, 1.0)
        ],
    )


def tokenizers(options: argparse.Namespace) -> Suite:
    """A draft with another tokenizer beside the demo draft: acceptance, tokens a pass, speed."""
    common = settings(options, kv_cache_tokens=16_384)
    base = {"model": str(widened(options.size, options.dtype)), **common}
    other = "another tokenizer"
    systems = {
        PAIR: System(base, {"model": str(DEMO_DRAFT), **common}),
        other: System(base, {"model": str(REPO / "models/other/draft"), **common}),
    }
    arms = {PLAIN: NO_DRAFTS}
    for name, system in ((MODEL, PAIR), (other, other)):
        arms[name] = Arm(Speculation(drafter=Drafter.MODEL), system)
        fixed = Speculation(drafter=Drafter.MODEL, num_draft_tokens=NUM_DRAFT_TOKENS)
        arms[f"{name}, K = {NUM_DRAFT_TOKENS}"] = Arm(fixed, system)
    return suite_of(options, "A draft of another tokenizer", systems, arms, bases=(PLAIN, MODEL), positions=4)


EDITED_FILES = (
    "outrider/drafting/lookup.py",
    "gateway/rounds/session.py",
    "target_service/leases/leases.py",
    "gateway/admission/queue.py",
    "outrider/engine/kv_pool.py",
    "outrider/wire/errors.py",
    "deploy/placement.py",
    "draft_service/worker.py",
)
EVERY_LINES = 8
"""Lines of a text from one that is inserted, or left out, to the next."""
USELESS = "random tokens"


def renamed(text: str) -> str:
    """Return the text with its most common name changed."""
    names = Counter(re.findall(r"\b[A-Za-z_]{3,}\b", text)).most_common(1)
    return re.sub(rf"\b{names[0][0]}\b", "renamed_here", text) if names else text


def inserted(text: str) -> str:
    """Return the text with a line more every EVERY_LINES."""
    lines = list[str]()
    for number, line in enumerate(text.split("\n"), start=1):
        lines.append(line)
        if number % EVERY_LINES == 0:
            lines.append("    number = compute(another_argument, 17)")
    return "\n".join(lines)


def deleted(text: str) -> str:
    """Return the text with a line less every EVERY_LINES."""
    lines = text.split("\n")
    del lines[EVERY_LINES - 1 :: EVERY_LINES]
    return "\n".join(lines)


def reordered(text: str) -> str:
    """Return the text with its halves swapped."""
    lines = text.split("\n")
    half = len(lines) // 2
    return "\n".join(lines[half:] + lines[:half])


EDITS: Mapping[str, Callable[[str], str]] = {
    "no edit": lambda text: text,
    "rename": renamed,
    "insertion": inserted,
    "deletion": deleted,
    "reordering": reordered,
}


def predictions(options: argparse.Namespace) -> Suite:
    """Predicted outputs on edits of files of this repository, and a prediction of no use.

    What the demo target writes at temperature 0 after a file's beginning is the answer, and each kind of edit of that
    text is a prediction of it.
    """
    from outrider.lab.models.reference_generate import Reference

    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    prompts = list[list[int]]()
    answers = list[str]()
    reference = Reference(str(DEMO_TARGET))
    for name in EDITED_FILES[: options.prompts]:
        text = (REPO / name).read_text(encoding="utf-8")
        prompts.append(tokenizer.encode(text, add_special_tokens=False).ids[: PROMPT_TOKENS // 2])
        answers.append(tokenizer.decode(reference.generate(tokenizer.decode(prompts[-1]), options.max_tokens).ids))
    arms = {PLAIN: NO_DRAFTS, "lookup": drafting(Drafter.LOOKUP), MODEL: drafting(Drafter.MODEL)}
    dice = random.Random(0)
    noise = [tokenizer.decode(dice.choices(range(256, 4096), k=options.max_tokens)) for _ in answers]
    texts = {kind: [edit(answer) for answer in answers] for kind, edit in EDITS.items()}
    for kind, predicted in {**texts, USELESS: noise}.items():
        for drafter in (Drafter.PREDICTION, Drafter.PREDICTION_MODEL):
            arms[f"{kind}, {drafter.value}"] = Arm(Speculation(drafter=drafter), predictions=predicted)
    expected = [Expectation(f"{USELESS}, {Drafter.PREDICTION.value}", PLAIN, speed, 0.97)]
    return suite_of(
        options,
        "Predicted outputs",
        wide_pair(options),
        arms,
        prompts=prompts,
        cells=[Cell(0.0)],
        bases=(PLAIN, "lookup"),
        expectations=expected,
    )


def structured(options: argparse.Namespace) -> Suite:
    """Speed with a JSON schema that ends no answer beside the speed without, plain and drafted."""
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}, "minItems": 500}
    schema = {"type": "object", "properties": {"numbers": numbers}, "required": ["numbers"]}
    with_schema = {"structured_outputs": StructuredOutputs(json=schema)}
    arms = {
        PLAIN: NO_DRAFTS,
        "schema": Arm(Speculation(enabled=False), options=with_schema, is_exact=False),
        AUTO: drafting(),
        f"{AUTO}, schema": Arm(Speculation(), options=with_schema, is_exact=False),
    }
    return suite_of(options, "Structured output", wide_pair(options), arms, bases=(PLAIN, AUTO))


@dataclass(frozen=True)
class Entry:
    """A suite and the defaults of its options."""

    make: Callable[[argparse.Namespace], Suite]
    defaults: Mapping[str, Any] = field(default_factory=dict)


DEFAULTS: Mapping[str, Any] = {
    "size": "94M",
    "dtype": "float32",
    "temperatures": [0.0, 1.0],
    "concurrency": [1],
    "prompts": 24,
    "max_tokens": 64,
    "repetitions": 2,
}
SUITES: Mapping[str, Entry] = {
    "pays": Entry(pays, {"concurrency": [1, 8, 64], "prompts": 64}),
    "rules": Entry(rules, {"temperatures": [0.6, 1.0], "max_tokens": 128, "repetitions": 3}),
    "trees": Entry(trees, {"repetitions": 1}),
    "lookahead": Entry(lookahead, {"prompts": 12, "max_tokens": 96, "repetitions": 1}),
    "unions": Entry(unions),
    "heads": Entry(heads, {"temperatures": [0.0, 0.7, 1.0], "max_tokens": 96}),
    "tokenizers": Entry(tokenizers, {"temperatures": [0.0, 0.7, 1.0], "prompts": 12, "repetitions": 1}),
    "predictions": Entry(predictions, {"prompts": len(EDITED_FILES), "max_tokens": 192, "repetitions": 3}),
    "structured": Entry(structured, {"temperatures": [0.0], "concurrency": [1, 16], "repetitions": 4}),
}

_KEPT = list[tempfile.TemporaryDirectory[str]]()
"""Folders of widened heads: they are removed when the process ends."""


def kept_folder(name: str) -> Path:
    """Return an empty folder that lives as long as this process."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix=f"outrider-{name}-"))
    return Path(_KEPT[-1].name)
