"""Load a head from its files, with the embedding and lm_head of its target if it has none. Called by the draft worker.

Like a model, a head is self-tested at load: its logits with the KV cache, on chains and trees, are compared with its
logits without a cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.engine import memory
from outrider.engine.architectures.context import context_limit_of, settle_rope
from outrider.engine.attention.forward_path import RepackedPath
from outrider.engine.errors import PathUnavailable
from outrider.engine.files.ends import read_ends
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.head_path import FusedHeadPath, HeadPath
from outrider.engine.heads.kinds import HeadKind
from outrider.engine.heads.network import HeadNetwork
from outrider.engine.heads.projection import Projection
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.attention_choice import check_cache, pack_weights, tree_refusal
from outrider.engine.loading.cache_size import size_cache
from outrider.engine.loading.loader import check_class, resolve_device
from outrider.engine.loading.self_test import NUM_BLOCKS, ReferenceLogits
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.quantization.packed_linear import pack_linears
from outrider.engine.step_plan import VERIFY_TOKENS, Row
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import full_name
from outrider.wire.settings.config import WorkerConfig
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

EXACT = re.compile(r"\.e_score_correction_bias$")
"""Pattern of names of tensors that keep their own dtype, as in transformers: a lower precision would change the routing
to experts."""
TEST_CONTEXT = 64
"""Maximum length in tokens of a text in the self-test of heads. For a head that fills blocks, a block is appended to
it."""
AnyHeadPath = HeadPath | FusedHeadPath


def _create_paged(network: HeadNetwork, _facts: ModelFacts) -> HeadPath:
    return HeadPath(network)


PATHS: Mapping[str, Callable[[HeadNetwork, ModelFacts], AnyHeadPath]] = {
    "fused": FusedHeadPath,
    "paged": _create_paged,
}
"""Functions that create a head's attention path, by the path's name."""


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """Head of any kind, loaded and ready to draft for its target."""

    network: HeadNetwork
    """The head's network. The wiring test may change those fields of its configuration that `undecided` names."""
    projection: Projection
    """Projection of the target's hidden states to features, on the CPU."""
    facts: ModelFacts
    num_layers: int
    """Number of the target's layers."""
    runner: ModelRunner | None = None
    """Runner of the head's forwards, which holds the head's KV cache; None for heads without a cache. Its logits are
    `UNMAPPED` (-1e9) for token ids for which the lm_head has no row."""
    undecided: tuple[str, ...] = ()
    """Names of boolean fields of `network.facts` that the head's files do not state. The wiring test finds out their
    values."""

    @property
    def path(self) -> AnyHeadPath:
        """Attention path of `runner`. After a forward, its `hidden` has the head's hidden states at the positions of
        the logits. Only for a head with a KV cache.
        """
        assert self.runner is not None and isinstance(self.runner.path, HeadPath | FusedHeadPath), "it has no cache"
        return self.runner.path


def load_head(config: WorkerConfig, target: str, kind: HeadKind, allow_pickle: bool = False) -> LoadedHead:
    """Load the head in `config.model` for a target, given as a folder or hub id, and allocate its KV cache.

    An embedding or lm_head that the head's files leave out is taken from the target. `allow_pickle`: whether the
    weights may be read from a pickle if there is no other file. Raises a `ConfigError` that names what cannot be
    served.
    """
    assert kind.network is not None and kind.read is not None, "a model has its own loader"
    device = resolve_device(config.device)
    files = TargetFiles(target)
    limit = context_limit_of(files.config, config.context_limit)
    check_class(files.config)
    read = kind.read(Checkpoint(config.model, allow_pickle), files)
    with memory.explain_out_of_memory(config.model, device):
        network = kind.network.of(read.facts, _move(read.tensors, device, config.dtype))
        facts = ModelFacts(
            model_id=full_name(config.model),
            vocab_size=files.vocab_size,
            context_limit=limit,
            dtype=str(network.dtype).removeprefix("torch."),
            device=str(device),
            eos_token_ids=read_ends(target, files.config).ids,
            num_parameters=sum(weight.numel() for weight in network.parameters()),
        )
        runner = None
        if kind.paths:
            settle_rope(network, limit)
            runner = _load_runner(network, facts, kind, config)
        elif device.type == "cpu":
            pack_linears(network)  # compares each with the plain one
    log.info(
        "loaded %s: %s of %s, %d parameters, %s on %s, reads the hidden states %s",
        *(config.model, kind.name, target, facts.num_parameters, facts.dtype, facts.device),
        list(read.projection.spec.taps),
    )
    return LoadedHead(network, read.projection, facts, files.num_layers, runner, read.undecided)


def dtype_of(tensors: Mapping[str, Tensor], device: torch.device, dtype: str) -> torch.dtype:
    """Return the torch dtype in which a head with these tensors runs: the one that the setting `dtype` names or, for
    "auto", float32 on a CPU and the dtype of the lm_head in `tensors` on a GPU.
    """
    if dtype == "auto" and device.type != "cpu":
        return next(tensor.dtype for name, tensor in tensors.items() if name.startswith("lm_head"))
    found: torch.dtype = getattr(torch, dtype, torch.float32)
    return found


def _move(tensors: Mapping[str, Tensor], device: torch.device, dtype: str) -> dict[str, Tensor]:
    head_dtype = dtype_of(tensors, device, dtype)
    moved = dict[str, Tensor]()
    for name, tensor in tensors.items():
        moved[name] = tensor.to(device)
        if tensor.is_floating_point() and not EXACT.search(name):
            moved[name] = tensor.to(device, head_dtype)
    return moved


def _load_runner(network: HeadNetwork, facts: ModelFacts, kind: HeadKind, config: WorkerConfig) -> ModelRunner:
    path = _choose_path(network, facts, kind, config.attention_path)
    runner = ModelRunner(path, facts, KVPool(NUM_BLOCKS, path.block_size), network.device)
    num_positions = VERIFY_TOKENS
    if network.lag:
        runner.tree_refusal = None  # tested
    elif network.block is not None:
        num_positions = network.block.size
    num_weight_bytes = memory.weights_bytes(network)
    if isinstance(path, RepackedPath):  # beside the modules, of which the embedding is used
        num_weight_bytes += path.weights_bytes - network.get_input_embeddings().weight.nbytes
    size_cache(runner, network.config, num_weight_bytes, config, num_positions=num_positions)
    return runner


def _choose_path(network: HeadNetwork, facts: ModelFacts, kind: HeadKind, setting: str) -> AnyHeadPath:
    names = kind.paths
    if setting in PATHS:
        names = (setting,)
    refusals = list[str]()
    for name in names:
        try:
            if name not in kind.paths:
                raise PathUnavailable(f"is not made for {kind.label}; leave attention_path at auto")
            path = PATHS[name](network, facts)
            runner, reference = _create_tested_runner(network, path, facts)
        except PathUnavailable as reason:
            refusals.append(f"{name}: {reason}")
            continue
        if name == "paged" and network.device.type == "cpu":
            pack_weights(network, runner, reference)
        others = ""
        if refusals:
            others = f"; not {refusals[0]}"
        log.info("%s takes the path %s%s", facts.model_id, name, others)
        return path
    raise ConfigError(
        f"{facts.model_id} in {facts.dtype} on {facts.device} cannot be served: {'; '.join(refusals)}", param="model"
    )


def _create_tested_runner(
    network: HeadNetwork, path: AnyHeadPath, facts: ModelFacts
) -> tuple[ModelRunner, ReferenceLogits]:
    if not network.lag and network.block is not None:
        facts = replace(facts, context_limit=max(facts.context_limit, TEST_CONTEXT + network.block.size))
    runner = _TestRunner(path, facts, KVPool(2 * NUM_BLOCKS, path.block_size), network.device)
    reference = ReferenceLogits(_Uncached(network))
    check_cache(runner, reference)
    if network.lag:
        refusal = tree_refusal(runner, reference)
        if refusal is not None:
            raise PathUnavailable(f"token trees: {refusal}")
    return runner, reference


def _test_features(network: HeadNetwork, token_ids: Sequence[int]) -> Tensor:
    columns = torch.arange(network.facts.width)[None] + 1
    ids = torch.tensor(token_ids, dtype=torch.int64)[:, None] + 1
    return torch.sin(ids * columns).to(network.device, network.dtype)


def _test_block(network: HeadNetwork, num_tokens: int) -> list[int]:
    assert network.block is not None, "a head of blocks"
    return network.block.token_ids(num_tokens % network.facts.vocab_size, network.block.size)


class _TestRunner(ModelRunner):
    """Runner that adds features to the rows of the self-test, which have ids alone.

    In a block head, a text's tokens have no logits. In their place are the concatenated logits of a block after the
    text, the same for each token.
    """

    def forward(self, rows: Sequence[Row]) -> Tensor:
        network = self.path.head  # type: ignore[attr-defined]
        fed = list[Row]()
        for row in rows:
            features = _test_features(network, row.new_ids)
            if row.num_logits and not network.lag:
                ids = _test_block(network, row.num_tokens)
                row = replace(row, new_ids=[*row.new_ids, *ids], num_logits=len(ids))
            fed.append(replace(row, features=features))
        logits = network.mapped(super().forward(fed))
        if network.lag:
            return logits
        for row in rows:
            row.table.truncate(row.num_tokens)
        counts = torch.tensor([row.num_logits for row in rows if row.num_logits], device=logits.device)
        return logits.view(len(counts), -1).repeat_interleave(counts, dim=0)


class _Uncached(UncachedModel):
    _model: HeadNetwork

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], source_ids: Sequence[int] = ()) -> Tensor:
        network = self._model
        ids = list(token_ids)
        if not network.lag:
            ids = _test_block(network, len(token_ids))
        output = network(torch.tensor([ids], device=network.device), _test_features(network, token_ids)[None])
        logits = network.mapped(output.logits[0]).float()  # [T, Vd], or [B, Vd] of a block
        if network.lag:
            return logits
        return logits.view(1, -1).expand(len(token_ids), -1)  # [T, B * Vd]
