"""Writes docs/architectures.md's table: `python -m tests.architectures_table`. The test of the same name compares it.

Every architecture of `tests.zoo` runs on every path that accepts it, as the loader would choose it on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.loader import decoder_start_of
from outrider.engine.model_runner import ModelFacts, ModelRunner, UncachedModel
from outrider.engine.paths.block_cache import num_decoder_layers
from outrider.engine.paths.choice import FACTORIES, PathUnavailable, choose_path, features_refusal, tree_refusal
from tests.rounds import largest_error, largest_tree_error, truth_of
from tests.tiny_models import random_model
from tests.zoo import ARCHITECTURES

DOCUMENT = Path(__file__).parent.parent / "docs" / "architectures.md"
BEGIN, END = "<!-- table: python -m tests.architectures_table -->", "<!-- end of table -->"
NUM_BLOCKS = 64
SMALLEST_BOUND = 1e-5
"""Errors below are not told apart: the last bits differ between machines."""


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    notes: str
    chosen: str
    """The path that auto takes."""
    errors: dict[str, float]
    """Largest logit error by path, for every path that accepts the architecture; trees included where it runs them."""
    trees: bool
    """Whether the path that auto takes runs token trees."""
    untapped: dict[str, str]
    """Why its hidden states cannot be tapped, by path, for every path that accepts it and gives none."""


def facts_of(model: PreTrainedModel) -> ModelFacts:
    hidden_size, start = model.config.get_text_config(decoder=True).hidden_size, decoder_start_of(model.config, None)
    layers = {"num_layers": num_decoder_layers(model.config), "hidden_size": hidden_size, "decoder_start_ids": start}
    return ModelFacts("tiny", 97, 128, "float32", "cpu", (), 0, **layers)


def measure(name: str) -> Measured:
    """Raises ConfigError when no path takes it."""
    architecture = ARCHITECTURES[name]
    model = random_model(architecture.config, seed=3)
    facts, truth, errors, untapped = facts_of(model), truth_of(model), dict[str, float](), dict[str, str]()
    for path in ["dense"] if model.config.is_encoder_decoder else FACTORIES:
        try:
            forward = FACTORIES[path](model, facts)
        except PathUnavailable:
            continue
        runner = ModelRunner(forward, facts, KVPool(NUM_BLOCKS, forward.block_size), model.device)
        runner.tree_refusal = tree_refusal(runner, UncachedModel(model))
        errors[path] = largest_error(runner, truth)
        if runner.supports_trees:
            errors[path] = max(errors[path], largest_tree_error(runner, truth))
        refusal = None if facts.decoder_start_ids else features_refusal(runner, UncachedModel(model))
        if refusal is not None:
            untapped[path] = refusal
    chosen = choose_path(model, facts, "auto", False)
    return Measured(name, architecture.notes, chosen.path.name, errors, chosen.supports_trees, untapped)


def bound(error: float) -> str:
    """The power of ten above."""
    return f"{max(SMALLEST_BOUND, 10 ** math.ceil(math.log10(error))) if error > 0 else SMALLEST_BOUND:.0e}"


def table(measured: list[Measured]) -> str:
    lines = [
        "| architecture | path chosen | also runs on | trees | largest error | notes |",
        "|---|---|---|---|---|---|",
    ]
    for one in measured:
        others = ", ".join(path for path in one.errors if path != one.chosen)
        error = bound(max(one.errors.values()))
        trees = "yes" if one.trees else "no"
        lines.append(f"| {one.name} | {one.chosen} | {others or '-'} | {trees} | < {error} | {one.notes} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)  # models this small only lose by more
    text = DOCUMENT.read_text()
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    rows = table([measure(name) for name in sorted(ARCHITECTURES)])
    DOCUMENT.write_text(f"{head}{BEGIN}\n\n{rows}\n\n{tail}")


if __name__ == "__main__":
    main()
