"""Load a head's files, and what they leave out of the target's, into something that runs. Called by the draft worker.

A head is tested as a model is: on our cache, chains and trees, against the head itself without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from outrider.engine.heads.block_check import tested_path
from outrider.engine.heads.block_path import BlockHeadPath
from outrider.engine.heads.carry_head import CarryHead
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.dflash import DFlashHead
from outrider.engine.heads.dflash_files import read_dflash
from outrider.engine.heads.eagle3 import Eagle3Head
from outrider.engine.heads.eagle3_files import read_eagle3
from outrider.engine.heads.fused_head import FusedHeadPath
from outrider.engine.heads.head_network import HeadFiles, HeadNetwork, MaskEntry
from outrider.engine.heads.head_path import HeadPath, RunsHead
from outrider.engine.heads.joined import JoinedHead
from outrider.engine.heads.joined_files import read_eagle1, read_mtp
from outrider.engine.heads.kinds import DraftKind
from outrider.engine.heads.medusa import MedusaHeads
from outrider.engine.heads.medusa_files import read_medusa
from outrider.engine.heads.opening import OpeningMap
from outrider.engine.heads.peagle_files import read_peagle
from outrider.engine.heads.target_files import TargetFiles
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading import memory
from outrider.engine.loading.context import context_limit_of, settle_rope
from outrider.engine.loading.ends import read_ends
from outrider.engine.loading.loader import check_class, resolve_device, size_cache
from outrider.engine.loading.packed_linear import pack_linears
from outrider.engine.loading.self_test import NUM_BLOCKS, Remembered
from outrider.engine.model_runner import ModelFacts, ModelRunner, UncachedModel
from outrider.engine.paths.choice import check_cache, pack, tree_refusal
from outrider.engine.paths.forward_path import PathUnavailable, Repacks
from outrider.engine.step_plan import VERIFY_TOKENS, Row
from outrider.wire.errors import ConfigError
from outrider.wire.log import get_logger
from outrider.wire.model_id import full_name
from outrider.wire.settings.config import WorkerConfig

log = get_logger(__name__)

EXACT = re.compile(r"\.e_score_correction_bias$")
"""Names of tensors that keep their own dtype, as in transformers: less would send tokens to other experts."""


@dataclass(frozen=True, slots=True)
class LoadedHead:
    runner: ModelRunner
    """Runs rows with features; its logits have UNMAPPED where the head has no row."""
    path: RunsHead | BlockHeadPath
    """The runner's, which has the carries, or the hidden states of blocks."""
    opening: OpeningMap
    """For the target, on the CPU."""
    undecided: tuple[str, ...] = ()
    """As in `HeadFiles`."""
    mask: MaskEntry | None = None
    """As in `HeadFiles`, where the head is."""

    @property
    def head(self) -> HeadNetwork:
        """The network that the path runs; `decide` changes what `undecided` names."""
        return self.path.head


READERS: Mapping[DraftKind, tuple[type[HeadNetwork], Callable[[Checkpoint, TargetFiles], HeadFiles]]] = {
    DraftKind.EAGLE1: (JoinedHead, read_eagle1),
    DraftKind.EAGLE3: (Eagle3Head, read_eagle3),
    DraftKind.MTP: (JoinedHead, read_mtp),
    DraftKind.PEAGLE: (Eagle3Head, read_peagle),
    DraftKind.DFLASH: (DFlashHead, partial(read_dflash, is_dspark=False)),
    DraftKind.DSPARK: (DFlashHead, partial(read_dflash, is_dspark=True)),
}
"""Kinds of heads that have a cache."""


@dataclass(frozen=True, slots=True)
class LoadedMedusa:
    heads: MedusaHeads
    facts: ModelFacts
    opening: OpeningMap
    """The identity of the target's last hidden state after its norm."""


def load_head(
    config: WorkerConfig, target: str, allow_pickle: bool = False, kind: DraftKind = DraftKind.EAGLE3
) -> LoadedHead:
    """Load a head of READERS for a target's folder or hub id, of which what the head leaves out is read; size its
    cache.

    allow_pickle: as `Checkpoint` has it. Raises ConfigError for anything that cannot be served, naming it.
    """
    device, target_files = resolve_device(config.device), TargetFiles(target)
    limit = context_limit_of(target_files.config, config.context_limit)
    check_class(target_files.config)
    head_class, read_files = READERS[kind]
    read = read_files(Checkpoint(config.model, allow_pickle), target_files)
    with memory.fits(config.model, device):
        head = head_class.of(read.facts, _placed(read.tensors, device, config.dtype))
    mask = read.mask and replace(read.mask, feature=read.mask.feature.to(device, head.dtype))
    settle_rope(head, limit)
    facts = _facts(config.model, target_files, head.dtype, device, limit, head.parameters())
    with memory.fits(config.model, device):
        path = _path(head, facts, config.attention_path)
    runner = ModelRunner(path, facts, KVPool(NUM_BLOCKS, path.block_size), device)
    num_positions = VERIFY_TOKENS
    if isinstance(path, BlockHeadPath):
        num_positions = read.facts.block_size
    else:
        runner.tree_refusal = None  # tested
    num_weight_bytes = memory.weights_bytes(head)
    if isinstance(path, Repacks):  # beside the modules, which say what the embedding is
        num_weight_bytes += path.weights_bytes - head.get_input_embeddings().weight.nbytes
    size_cache(runner, head.config, num_weight_bytes, config, num_positions=num_positions)
    log.info(
        "loaded %s: %s of %s, %d parameters, %s on %s, reads the hidden states %s, %d KV blocks of %d tokens",
        *(config.model, kind, target, facts.num_parameters, facts.dtype, facts.device, list(read.opening.spec.taps)),
        *(runner.pool.num_blocks, path.block_size),
    )
    return LoadedHead(runner, path, read.opening, read.undecided, mask)


def load_medusa(config: WorkerConfig, target: str, allow_pickle: bool = False) -> LoadedMedusa:
    """Load Medusa or blockwise heads for a target, as `load_head` does. They have no cache."""
    device, target_files = resolve_device(config.device), TargetFiles(target)
    limit = context_limit_of(target_files.config, config.context_limit)
    read = read_medusa(Checkpoint(config.model, allow_pickle), target_files)
    with memory.fits(config.model, device):
        heads = MedusaHeads.of(read.facts, _placed(read.tensors, device, config.dtype))
    facts = _facts(config.model, target_files, heads.dtype, device, limit, heads.parameters())
    if device.type == "cpu":
        pack_linears(heads)  # which compares each with the plain one
    log.info(
        "loaded %s: %d Medusa heads of %s%s, %d parameters, %s on %s",
        *(config.model, read.facts.num_heads, target, " that share a projection" * read.facts.shares_projection),
        *(facts.num_parameters, facts.dtype, facts.device),
    )
    return LoadedMedusa(heads, facts, read.opening)


def _placed(tensors: Mapping[str, Tensor], device: torch.device, dtype: str) -> dict[str, Tensor]:
    """Return the tensors on the device, in the dtype of the settings; auto as for models."""
    own = tensors["lm_head.weight" if "lm_head.weight" in tensors else "lm_heads.0.weight"].dtype
    wanted = getattr(torch, dtype) if dtype != "auto" else (torch.float32 if device.type == "cpu" else own)
    return {
        name: tensor.to(device, wanted) if tensor.is_floating_point() and not EXACT.search(name) else tensor.to(device)
        for name, tensor in tensors.items()
    }


def _facts(
    model: str, target: TargetFiles, dtype: torch.dtype, device: torch.device, limit: int, weights: Iterable[Tensor]
) -> ModelFacts:
    return ModelFacts(
        model_id=full_name(model),
        vocab_size=target.vocab_size,
        context_limit=limit,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        eos_token_ids=read_ends(target.model, target.config).ids,
        num_parameters=sum(weight.numel() for weight in weights),
    )


def _path(head: HeadNetwork, facts: ModelFacts, wanted: str) -> RunsHead | BlockHeadPath:
    """Return a tested path: fused where it can be had, else the head's own modules. Raises ConfigError."""
    refusals = list[str]()
    if isinstance(head, DFlashHead):
        if wanted not in ("auto", "paged"):
            raise ConfigError(
                f"{facts.model_id} fills blocks and runs on the path paged alone; leave attention_path at auto, not "
                f"{wanted}",
                param="attention_path",
            )
        try:
            return tested_path(head, facts)
        except PathUnavailable as reason:
            raise _unservable(facts, [f"paged: {reason}"]) from reason
    assert isinstance(head, CarryHead)
    if wanted in ("auto", "fused"):
        try:
            fused = FusedHeadPath(head, facts)
            _test(head, fused, facts)
            return fused
        except PathUnavailable as reason:
            refusals.append(f"fused: {reason}")
    if wanted != "fused":
        try:
            paged = HeadPath(head)
            runner, truth = _test(head, paged, facts)
        except PathUnavailable as reason:
            refusals.append(f"paged: {reason}")
        else:
            if head.device.type == "cpu":
                pack(head, runner, truth)
            log.info("%s takes the path paged%s", facts.model_id, f"; not {refusals[0]}" if refusals else "")
            return paged
    raise _unservable(facts, refusals)


def _unservable(facts: ModelFacts, refusals: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{facts.model_id} in {facts.dtype} on {facts.device} cannot be served: {'; '.join(refusals)}", param="model"
    )


def _test(head: CarryHead, path: RunsHead, facts: ModelFacts) -> tuple[ModelRunner, Remembered]:
    """Raise PathUnavailable unless the path computes what the head does; return what it was tested with."""
    runner = _TestRunner(path, facts, KVPool(NUM_BLOCKS, path.block_size), head.device)
    truth = Remembered(_Uncached(head))
    check_cache(runner, truth)
    refusal = tree_refusal(runner, truth)
    if refusal is not None:
        raise PathUnavailable(f"token trees: {refusal}")
    return runner, truth


def _test_features(head: CarryHead, token_ids: Sequence[int]) -> Tensor:
    """Return the features [T, d] that the self-test gives to tokens: a token's are always the same."""
    width = head.facts.width
    columns = torch.arange(width)[None] + 1
    ids = torch.tensor(token_ids)[:, None] + 1
    return torch.sin(ids * columns).to(head.device, head.dtype)


class _TestRunner(ModelRunner):
    """Gives features to the rows of the self-test, which knows of ids alone."""

    def forward(self, rows: Sequence[Row]) -> Tensor:
        assert isinstance(self.path, HeadPath | FusedHeadPath)
        head = self.path.head
        fed = [replace(row, features=_test_features(head, row.new_ids)) for row in rows]
        return head.mapped(super().forward(fed))


class _Uncached(UncachedModel):
    """The head without our cache, over the same features."""

    def __init__(self, head: CarryHead) -> None:
        self._head = head

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], source_ids: Sequence[int] = ()) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self._head.device)  # [1, T]
        output = self._head(input_ids=ids, features=_test_features(self._head, token_ids)[None])
        return self._head.mapped(output.logits[0]).float()
