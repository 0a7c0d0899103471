"""Miswirings of a head that can be planted: in what its files say, or in the network where no file can say it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.eagle3 import Eagle3Head
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.head_loader import LoadedHead
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.projection import Projection
from outrider.engine.heads.wiring import MAX_TOKENS, ProbeStates
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_runner import ModelRunner

FIRST = "layers.0."


@dataclass(frozen=True)
class Fault:
    """A miswiring of a head, and whether the test tries what would mend it."""

    label: str
    is_tried: bool
    in_files: Callable[[HeadFiles], HeadFiles] = lambda files: files
    in_head: Callable[[Eagle3Head], None] = lambda head: None


def eagle3_faults(files: HeadFiles, num_layers: int) -> Iterator[Fault]:
    """Yield what can go wrong with such a head; what it has no part for is left out."""
    taps = files.projection.spec.taps
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
    yield Fault("norm before the lm_head left out", False, partial(with_facts, name="is_lm_head_normed"))
    yield Fault("first residual normed, or not", True, partial(with_facts, name="norm_before_residual"))
    yield Fault("carry normed, or not", False, partial(with_facts, name="is_carry_normed"))
    if files.projection.norm is not None:
        yield Fault("norm of the taps left out", False, without_projection_norm)
    if "draft_ids" in files.tensors:
        yield Fault("d2t taken as absolute ids", False, absolute_ids)


def with_taps(files: HeadFiles, taps: tuple[int, ...]) -> HeadFiles:
    projection = files.projection
    spec = replace(projection.spec, taps=taps)
    return replace(files, facts=replace(files.facts, taps=taps), projection=Projection(spec, projection.tensors))


def without_projection_norm(files: HeadFiles) -> HeadFiles:
    spec = replace(files.projection.spec, norm="none")
    assert files.projection.fc is not None
    return replace(files, projection=Projection(spec, {"fc": files.projection.fc}))


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
    projection = Projection(files.projection.spec, shuffled(files.projection.tensors, generator))
    return replace(files, tensors=shuffled(files.tensors, generator), projection=projection)


def float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def made(files: HeadFiles, sound: LoadedHead) -> LoadedHead:
    """Return what these files give, without the tests of a load."""
    head = Eagle3Head.of(files.facts, float32(files.tensors))
    path, facts = HeadPath(head), sound.facts
    runner = ModelRunner(path, facts, KVPool(2 * MAX_TOKENS // path.block_size, path.block_size), head.device)
    runner.tree_refusal = None
    return replace(sound, network=head, projection=files.projection, runner=runner, undecided=files.undecided)


def exchanged(seen: ProbeStates) -> ProbeStates:
    """Return what a head sees that reads the last hidden state on the wrong side of the final norm."""
    last = max(seen.taps)
    return replace(seen, taps={**seen.taps, NORMED: seen.taps[last], last: seen.taps[NORMED]})
