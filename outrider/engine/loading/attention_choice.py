"""Choose a model's path: the first that can be built for it and passes the self-test. Called by the loader."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from outrider.engine.architectures import layer_memory
from outrider.engine.architectures.layer_memory import selecting_few_keys
from outrider.engine.attention.dense import DensePath
from outrider.engine.attention.forward_path import BLOCK_SIZE, ForwardPath, GivesFeatures, RunsTrees
from outrider.engine.attention.fused import FusedPath
from outrider.engine.attention.paged import PagedPath
from outrider.engine.cuda.graphed_path import graphed_path
from outrider.engine.errors import PathUnavailable
from outrider.engine.files.model_files import first_line
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.self_test import (
    NUM_BLOCKS,
    TOLERANCE,
    Remembered,
    largest_error,
    largest_feature_error,
    largest_tree_error,
    layer_that_differs,
    layer_that_raised,
    own_cache_refusal,
)
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.quantization.packed_linear import pack_linears, unpack_linears
from outrider.wire.errors import ConfigError
from outrider.wire.telemetry.log import get_logger
from outrider.wire.telemetry.phases import log_phase

__all__ = [
    "BLOCK_SIZE",
    "FACTORIES",
    "PathUnavailable",
    "check_cache",
    "choose_path",
    "margin",
    "pack",
    "tree_refusal",
]

log = get_logger(__name__)


def _flash(model: PreTrainedModel, facts: ModelFacts) -> ForwardPath:
    return graphed_path(model, facts.vocab_size)


def _paged(model: PreTrainedModel, facts: ModelFacts) -> ForwardPath:
    return PagedPath(model, facts.vocab_size, num_ids=facts.num_ids)


def _dense(model: PreTrainedModel, facts: ModelFacts) -> ForwardPath:
    return DensePath(model, facts.vocab_size, facts.num_ids)


def _dense_by_columns(model: PreTrainedModel, facts: ModelFacts) -> ForwardPath:
    return DensePath(model, facts.vocab_size, facts.num_ids, counts_columns=True)


FACTORIES: dict[str, Callable[[PreTrainedModel, ModelFacts], ForwardPath]] = {
    "fused": FusedPath,
    "flash": _flash,
    "paged": _paged,
    "dense": _dense,
}
"""Paths by name, the fastest first. Each raises PathUnavailable for a model, device or machine that it cannot run."""
MODULE_PATHS = ("paged", "dense")
"""Paths that run the model's own modules on a CPU, and so the linear layers that replace some of them."""


def choose_path(
    model: PreTrainedModel, facts: ModelFacts, wanted: str, batch_invariant: bool, gives_features: bool = False
) -> ModelRunner:
    """Return a runner on the path `wanted`, a name of FACTORIES or auto. Its pool is the self-test's, of NUM_BLOCKS.

    gives_features: whether its hidden states may be tapped, which is tested now: later the model may be gone.
    Raises ConfigError, which says why each path that was tried was refused.
    """
    try:
        with selecting_few_keys(model, facts.layer_types):
            return _choose(model, facts, wanted, batch_invariant, gives_features)
    except PathUnavailable as reason:  # of no path
        raise ConfigError(
            f"{type(model).__name__} cannot be served: {reason}; use another model", param="model"
        ) from None


def _choose(
    model: PreTrainedModel, facts: ModelFacts, wanted: str, batch_invariant: bool, gives_features: bool
) -> ModelRunner:
    class_name, refusals, truth = type(model).__name__, list[str](), Remembered(UncachedModel(model))
    for name in FACTORIES if wanted == "auto" else [wanted]:
        try:
            runner = _try(name, model, facts, truth, batch_invariant)
        except PathUnavailable as reason:
            refusals.append(f"{name}: {reason}")
            continue
        others = f"; not {', nor '.join(refusals)}" if refusals else ""
        as_set = "" if wanted == "auto" else ", as set"
        log.info("%s takes the path %s%s%s; self-test: %s", class_name, name, as_set, others, margin(runner))
        if gives_features:
            runner.features_refusal = features_refusal(runner, UncachedModel(model))
            if runner.features_refusal is not None:
                log.info("%s gives no features on the path %s: %s", class_name, name, runner.features_refusal)
        if name in MODULE_PATHS and model.device.type == "cpu" and facts.num_ranks == 1:
            pack(model, runner, truth)
        return runner
    own = own_cache_refusal(model, facts)
    if own is not None:
        raise ConfigError(f"{class_name} cannot be served: {own}; use another model", param="model")
    raise ConfigError(
        f"{class_name} on {facts.device} in {facts.dtype} cannot be served: {'; '.join(refusals)}; "
        f"use another model, dtype or attention_path{_or_without(facts, batch_invariant)}",
        param="attention_path" if wanted != "auto" else "model",
    )


def _or_without(facts: ModelFacts, batch_invariant: bool) -> str:
    """Name the settings that keep paths from serving."""
    given = ["tensor_parallel"] * (facts.num_ranks > 1) + ["batch_invariant"] * batch_invariant
    return f", or leave out {' and '.join(given)}" if given else ""


def _try(name: str, model: PreTrainedModel, facts: ModelFacts, truth: Remembered, batch_invariant: bool) -> ModelRunner:
    """Return a tested runner on the path, or raise PathUnavailable."""
    if model.config.is_encoder_decoder and name != "dense":
        raise PathUnavailable("runs decoder-only models alone")
    log_phase(f"packing weights for the path {name}")
    path = FACTORIES[name](model, facts)
    if batch_invariant and not path.batch_invariant:
        raise PathUnavailable("cannot promise the same bits in every batch (batch_invariant)")
    try:
        runner = _tested(path, model, facts, truth)
    except PathUnavailable:
        if name != "dense":
            raise
        runner = _tested(_dense_by_columns(model, facts), model, facts, truth)
        log.info("%s numbers its tokens itself: rows of one length run together", type(model).__name__)
    runner.tree_refusal = tree_refusal(runner, truth)
    if runner.tree_refusal is not None:
        log.info("%s runs no token trees on the path %s: %s", type(model).__name__, name, runner.tree_refusal)
    return runner


def _tested(path: ForwardPath, model: PreTrainedModel, facts: ModelFacts, truth: Remembered) -> ModelRunner:
    """Return a runner whose cache passed the self-test. Raises PathUnavailable."""
    runner = ModelRunner(path, facts, KVPool(NUM_BLOCKS, path.block_size), model.device)
    log_phase(f"self-test of the path {path.name}")
    runner.self_test_error = check_cache(runner, truth)
    return runner


def pack(model: PreTrainedModel, runner: ModelRunner, truth: Remembered) -> None:
    """Lay the weights out for the CPU, if the runner then still passes the self-test against the plain ones, which
    `truth` remembers.
    """
    num_packed = pack_linears(model)
    if not num_packed:
        return
    try:
        runner.self_test_error = check_cache(runner, truth)
    except PathUnavailable as reason:
        unpack_linears(model)
        log.warning("%s keeps its plain linear layers: packed, it %s", type(model).__name__, reason)
        return
    log.info("%d linear layers of %s have packed weights", num_packed, type(model).__name__)


def tree_refusal(runner: ModelRunner, truth: UncachedModel | Remembered) -> str | None:
    """Return why rows may not be token trees, or None when they may."""
    if not isinstance(runner.path, RunsTrees):
        return "it has no attention of trees"
    reason = layer_memory.tree_refusal(runner.facts.layer_types)
    if reason is not None:
        return reason
    runner.tree_refusal = None  # or it would not be tried
    try:
        error = largest_tree_error(runner, truth)
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:  # whatever a class does with positions or a mask that it does not know
        return f"does not run with them: {type(reason).__name__}: {first_line(reason)}"
    if not error <= TOLERANCE[runner.facts.dtype]:  # NaN fails
        return f"computes other logits than for a chain: largest difference {error:.2e} of the largest logit"
    return None


def features_refusal(runner: ModelRunner, truth: UncachedModel) -> str | None:
    """Return why hidden states may not be tapped, or None when they may."""
    if not isinstance(runner.path, GivesFeatures):
        return "it has no taps"
    if runner.facts.decoder_start_ids:
        return "heads are of decoder-only models"
    runner.features_refusal = None  # or it would not be tried
    try:
        error = largest_feature_error(runner, truth)
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:  # whatever a class does that keeps its layers in its own way
        return f"cannot be tapped: {type(reason).__name__}: {first_line(reason)}"
    if not error <= TOLERANCE[runner.facts.dtype]:  # NaN fails
        return f"gives other hidden states than transformers: largest difference {error:.2e} of their length"
    return None


def margin(runner: ModelRunner) -> str:
    """Say how far from the truth the self-test's logits were, and how far they may be."""
    allowed = TOLERANCE[runner.facts.dtype]
    return f"largest difference {runner.self_test_error:.1e} of the largest logit, {allowed:g} allowed"


def check_cache(runner: ModelRunner, truth: Remembered) -> float:
    """Return the self-test's error, whose pool the runner must have. Raises PathUnavailable where it is too large."""
    try:
        error = largest_error(runner, truth)
    except (PathUnavailable, torch.OutOfMemoryError):  # of no cache; the model runs: there is too little memory
        raise
    except Exception as reason:  # whatever a class does with a cache it does not know
        where = _named(runner.facts, layer_that_raised(reason))
        raise PathUnavailable(
            f"does not run on this cache, {where}: {type(reason).__name__}: {first_line(reason)}"
        ) from reason
    tolerance = TOLERANCE[runner.facts.dtype]
    if not error <= tolerance:  # NaN fails
        where = _named(runner.facts, layer_that_differs(runner, truth))
        raise PathUnavailable(
            f"computes other logits with this cache than without one, {where}: largest difference {error:.2e} of "
            f"the largest logit, at most {tolerance:.0e} is allowed"
        )
    return error


def _named(facts: ModelFacts, layer: int | None) -> str:
    """Return the words for a decoder layer and its type, or for the types of all where it is not known."""
    types = facts.layer_types
    if layer is not None and layer < len(types):
        return f"first in layer {layer} ({types[layer]})"
    return f"in one of its layers ({', '.join(dict.fromkeys(types)) or 'attention'})"
