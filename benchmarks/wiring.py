"""The wiring test's power: how many planted faults it catches in a trained head, and its false alarms on a sound one.

    make bench-wiring                                 # or: python -m benchmarks.wiring --help

A fault is planted in what the files say (or in the network, where no file can say it), and the head is scored on texts
of its own, one a load: beginnings of held-apart prompts and pieces of this repository's files in turn. Models are
loaded once, in this process; the texts and the target's answers are the same for all faults.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import DEMO_EAGLE3, DEMO_MEDUSA, DEMO_TARGET, HELD_OUT, REPO, Report, head_at, parser
from benchmarks.common import read_prompts as prompts_of
from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.draft_vocabulary import target_ids
from outrider.engine.heads.eagle3 import Eagle3Head, read_eagle3
from outrider.engine.heads.families import EAGLE3, MEDUSA
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.loader import LoadedHead, load_head
from outrider.engine.heads.medusa import MedusaHeads, read_medusa
from outrider.engine.heads.opening import OpeningMap
from outrider.engine.heads.wiring import MAX_TOKENS, Outcome, Seen, probe_ids, score_head
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import DraftConfig, TargetConfig

SOUND = "none (false alarms)"
FIRST = "layers.0."
CODE = "outrider"
"""Folder whose files are cut for texts."""


@dataclass(frozen=True)
class Fault:
    """A miswiring of a head, and whether the test tries what would mend it."""

    label: str
    is_tried: bool
    in_files: Callable[[HeadFiles], HeadFiles] = lambda files: files
    in_head: Callable[[Eagle3Head], None] = lambda head: None


def eagle3_faults(files: HeadFiles, num_layers: int) -> Iterator[Fault]:
    """Yield what can go wrong with such a head; what it has no part for is left out."""
    taps = files.opening.spec.taps
    for by, word in ((-1, "lower"), (1, "higher")):
        moved = tuple(tap + by for tap in taps)
        if all(0 <= tap <= num_layers for tap in moved):
            yield Fault(f"all taps one {word}", True, partial(with_taps, taps=moved))
        for place, tap in enumerate(taps):
            if 0 <= tap + by <= num_layers:
                one = (*taps[:place], tap + by, *taps[place + 1 :])
                yield Fault(f"tap {tap} alone one {word}", True, partial(with_taps, taps=one))
    for a, b in combinations(range(len(taps)), 2):
        if taps[a] != taps[b]:
            swapped = list(taps)
            swapped[a], swapped[b] = taps[b], taps[a]
            yield Fault(
                f"taps {taps[a]} and {taps[b]} exchanged",
                True,
                partial(with_taps, taps=tuple(swapped)),
            )
    yield Fault("norms of embedding and feature swapped", True, swapped_norms)
    yield Fault("norm of the embedding left out", False, in_head=lambda head: leave_out(head, "input_layernorm"))
    yield Fault("norm of the feature left out", False, in_head=lambda head: leave_out(head, "hidden_norm"))
    yield Fault("norm before the lm_head left out", False, partial(with_facts, name="reads_normed"))
    yield Fault("first residual normed, or not", True, partial(with_facts, name="norm_before_residual"))
    yield Fault("carry normed, or not", False, partial(with_facts, name="carries_normed"))
    if files.opening.norm is not None:
        yield Fault("norm of the taps left out", False, without_opening_norm)
    if "draft_ids" in files.tensors:
        yield Fault("d2t taken as absolute ids", False, absolute_ids)


def with_taps(files: HeadFiles, taps: tuple[int, ...]) -> HeadFiles:
    opening = files.opening
    spec = replace(opening.spec, taps=taps)
    return replace(files, facts=replace(files.facts, taps=taps), opening=OpeningMap(spec, opening.tensors))


def without_opening_norm(files: HeadFiles) -> HeadFiles:
    spec = replace(files.opening.spec, norm="none")
    assert files.opening.fc is not None
    return replace(files, opening=OpeningMap(spec, {"fc": files.opening.fc}))


def swapped_norms(files: HeadFiles) -> HeadFiles:
    one, other = f"{FIRST}input_layernorm.weight", f"{FIRST}hidden_norm.weight"
    return replace(files, tensors={**files.tensors, one: files.tensors[other], other: files.tensors[one]})


def with_facts(files: HeadFiles, name: str) -> HeadFiles:
    """Turn a fact of the head round; what the files leave open is then decided, for nothing would be planted."""
    turned: dict[str, Any] = {name: not getattr(files.facts, name)}
    facts = replace(files.facts, **turned)
    return replace(files, facts=facts, undecided=tuple(each for each in files.undecided if each != name))


def absolute_ids(files: HeadFiles) -> HeadFiles:
    """Take d2t's offsets for ids."""
    ids = files.tensors["draft_ids"]
    return replace(files, tensors={**files.tensors, "draft_ids": ids - torch.arange(len(ids))})


def leave_out(head: Eagle3Head, name: str) -> None:
    setattr(head.layers[0], name, nn.Identity())


def shuffled(tensors: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors with their numbers in another order: of the same size, and of no meaning."""
    return {
        name: tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in tensors.items()
    }


def another_head(files: HeadFiles, seed: int) -> HeadFiles:
    """Return a head that was not trained for this target."""
    generator = torch.Generator().manual_seed(seed)
    opening = OpeningMap(files.opening.spec, shuffled(files.opening.tensors, generator))
    return replace(files, tensors=shuffled(files.tensors, generator), opening=opening)


def float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def made(files: HeadFiles, sound: LoadedHead) -> LoadedHead:
    """Return what these files give, without the tests of a load."""
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in files.tensors.items()}
    head = Eagle3Head.of(files.facts, tensors)
    path, facts = HeadPath(head), sound.facts
    runner = ModelRunner(path, facts, KVPool(2 * MAX_TOKENS // path.block_size, path.block_size), head.device)
    runner.tree_refusal = None
    return replace(sound, network=head, opening=files.opening, runner=runner, undecided=files.undecided)


def texts(num: int) -> Iterator[str]:
    """Yield texts, no two the same."""
    prompts = [prompt.text for prompt in prompts_of(HELD_OUT)]
    files = [path.read_text(encoding="utf-8") for path in sorted((REPO / CODE).rglob("*.py"))]
    pieces = [text[len(text) // 3 :] for text in files if len(text) > 4096]  # a beginning is imports
    for index in range(num):
        among = prompts if index % 2 == 0 else pieces
        if index // 2 >= len(among):
            sys.exit(f"{num} texts are wanted, and there are {index}")
        yield among[index // 2]


@torch.inference_mode()
def seen_by(runner: ModelRunner, ids: Sequence[int]) -> Seen:
    """Return what the target says of a text, with every hidden state that it has."""
    taps = [*range(runner.facts.num_layers + 1), NORMED]
    table = runner.pool.new_table()
    try:
        runner.set_taps(taps)
        logits = runner.forward([Row.of(table, ids, 0, len(ids))])
        states = runner.features.to(torch.bfloat16)  # as they travel, [T, taps, dt]
    finally:
        table.free()
        runner.set_taps(())
    return Seen(list(ids), {tap: states[:, index] for index, tap in enumerate(taps)}, logits.argmax(-1))


@dataclass(frozen=True)
class Tally:
    """What the test said of one fault, load by load."""

    label: str
    is_tried: bool
    outcomes: list[Outcome]

    @property
    def num_caught(self) -> int:
        return sum(outcome.fault is not None for outcome in self.outcomes)

    @property
    def row(self) -> list[str]:
        reasons = Counter(reason(outcome) for outcome in self.outcomes if outcome.fault is not None)
        agreement = sum(outcome.configured.agreement for outcome in self.outcomes) / len(self.outcomes)
        named = "; ".join(f"{why} ({count})" for why, count in reasons.most_common(3))
        tried = "" if self.label == SOUND else "yes" if self.is_tried else "no"
        return [self.label, f"{self.num_caught} of {len(self.outcomes)}", f"{agreement:.0%}", tried, named]


def reason(outcome: Outcome) -> str:
    winner = outcome.winner
    return "foretells nothing" if winner is None else winner.label


def eagle3_tallies(folder: Path, target: Path, seen: Sequence[Seen], num_layers: int) -> Iterator[Tally]:
    files = read_eagle3(Checkpoint(str(folder)), TargetFiles(str(target)))
    sound = load_head(DraftConfig(model=str(folder), device="cpu", dtype="float32"), str(target), EAGLE3)

    def scored(loaded: LoadedHead) -> list[Outcome]:
        return [score_head(loaded, each) for each in seen]

    yield Tally(SOUND, True, scored(sound))
    for fault in eagle3_faults(files, num_layers):
        loaded = made(fault.in_files(files), sound)
        fault.in_head(loaded.network)
        yield Tally(fault.label, fault.is_tried, scored(loaded))
    others = [score_head(made(another_head(files, seed), sound), each) for seed, each in enumerate(seen)]
    yield Tally("another target's head (random)", False, others)


def medusa_tallies(folder: Path, target: Path, seen: Sequence[Seen]) -> Iterator[Tally]:
    sound = load_head(DraftConfig(model=str(folder), device="cpu", dtype="float32"), str(target), MEDUSA)

    def scored(states: Sequence[Seen]) -> list[Outcome]:
        return [score_head(sound, each) for each in states]

    yield Tally(SOUND, True, scored(seen))
    yield Tally("state before the final norm for that after it", True, scored([exchanged(each) for each in seen]))
    files = read_medusa(Checkpoint(str(folder)), TargetFiles(str(target)))
    others = [score_head(another_medusa(sound, files, seed), each) for seed, each in enumerate(seen)]
    yield Tally("another target's heads (random)", False, others)


def exchanged(seen: Seen) -> Seen:
    """Return what a head sees that reads the last hidden state on the wrong side of the final norm."""
    last = max(seen.taps)
    return replace(seen, taps={**seen.taps, NORMED: seen.taps[last], last: seen.taps[NORMED]})


def another_medusa(sound: LoadedHead, files: HeadFiles, seed: int) -> LoadedHead:
    tensors = shuffled(float32(files.tensors), torch.Generator().manual_seed(seed))
    return replace(sound, network=MedusaHeads.of(files.facts, tensors))


def add(report: Report, heading: str, tallies: Sequence[Tally]) -> list[str]:
    columns = ("fault", "caught", "agreement as configured", "the test tries what would mend it", "because, most often")
    report.table(heading, columns, [tally.row for tally in tallies])
    report.data[heading] = {
        tally.label: [[outcome.configured.agreement, outcome.fault] for outcome in tally.outcomes] for tally in tallies
    }
    return [
        f"{heading}: {tally.num_caught} false alarms" for tally in tallies if tally.label == SOUND and tally.num_caught
    ]


def refused_at_load(files: HeadFiles, model: str) -> str:
    """Return what the loader says of maps that hold absolute ids in place of offsets."""
    ids = files.tensors.get("draft_ids")
    if ids is None:
        return "The head has no map of ids (d2t): it says all of the target's."
    try:
        target_ids(Checkpoint(model), ids, None, len(ids), files.facts.vocab_size)
    except ConfigError as error:
        return f"A file whose d2t holds absolute ids is refused when it is read: {error.message}."
    return "A file whose d2t holds absolute ids is read."


def main() -> int:
    made_parser = parser(__doc__, loads=50)
    for name, folder in (("target", DEMO_TARGET), ("eagle3", DEMO_EAGLE3), ("medusa", DEMO_MEDUSA)):
        made_parser.add_argument(f"--{name}", type=Path, default=folder, help="folder")
    options: argparse.Namespace = made_parser.parse_args()
    eagle3, medusa = head_at(options.eagle3, "eagle3"), head_at(options.medusa, "medusa")
    torch.set_num_threads(1)  # models so small gain nothing by more, and wait for each other where a core is busy
    runner = load_runner(TargetConfig(model=str(options.target), device="cpu", dtype="float32"))
    tokenizer = (options.target / "tokenizer.json").read_bytes()
    ids = [probe_ids(tokenizer, runner.facts.context_limit, text) for text in texts(options.loads)]
    seen = [seen_by(runner, each) for each in ids]
    report = Report("wiring", "What a head's test of its own wiring catches")
    report.text(
        f"The demo target and heads, float32; {options.loads} loads, each on another text of {min(map(len, ids))} to "
        f"{max(map(len, ids))} tokens. A random head is another one at each load."
    )
    num_layers = runner.facts.num_layers
    wrong = add(report, "EAGLE-3", list(eagle3_tallies(eagle3, options.target, seen, num_layers)))
    report.text(refused_at_load(read_eagle3(Checkpoint(str(eagle3)), TargetFiles(str(options.target))), str(eagle3)))
    wrong += add(report, "Medusa", list(medusa_tallies(medusa, options.target, seen)))
    report.verdict(wrong, "No false alarm.")
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
