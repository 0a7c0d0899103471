"""Choose a model's attention path: the fastest that can be built for it and passes the self-test.

Called by the loader of models. The loader of heads calls the checks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from outrider.engine.architectures import layer_memory
from outrider.engine.architectures.layer_memory import selecting_few_keys
from outrider.engine.attention.dense import DensePath
from outrider.engine.attention.forward_path import BLOCK_SIZE, FeaturePath, ForwardPath, TreePath
from outrider.engine.attention.fused import FusedPath
from outrider.engine.attention.paged import PagedPath
from outrider.engine.cuda.graphed_path import graphed_path
from outrider.engine.errors import PathUnavailable
from outrider.engine.files.model_files import first_line
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.own_cache import own_cache_refusal
from outrider.engine.loading.self_test import (
    NUM_BLOCKS,
    TOLERANCE,
    ReferenceLogits,
    largest_error,
    largest_feature_error,
    largest_tree_error,
    layer_that_differs,
    layer_that_raised,
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
    "describe_self_test",
    "pack_weights",
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
"""Functions that create an attention path for a model, by the path's name, the fastest path first. A function raises
`PathUnavailable` if its path cannot run the model, or cannot run on the device or machine."""
MODULE_PATHS = ("paged", "dense")
"""Names of the attention paths that call the model's own modules. With these paths, `pack_weights` packs the linear
layers among the modules on a CPU."""


def choose_path(
    model: PreTrainedModel, facts: ModelFacts, setting: str, batch_invariant: bool, supports_features: bool = False
) -> ModelRunner:
    """Return a runner of the model whose attention path passed the self-test. Its KV pool has the NUM_BLOCKS blocks of
    the self-test and must be replaced.

    setting: `attention_path`, a key of FACTORIES, or "auto" for the first of them that works. batch_invariant: the
    setting of this name; True = only batch-invariant paths are tried. supports_features: whether heads may read the
    model's hidden states, which are then tested, too.

    Raises ConfigError if no path can be used, with the reason for each path that was tried.
    """
    try:
        with selecting_few_keys(model, facts.layer_types):
            return _choose(model, facts, setting, batch_invariant, supports_features)
    except PathUnavailable as reason:  # transformers itself does not run the model, so that no path can
        raise ConfigError(
            f"{type(model).__name__} cannot be served: {reason}; use another model", param="model"
        ) from None


def _choose(
    model: PreTrainedModel, facts: ModelFacts, setting: str, batch_invariant: bool, supports_features: bool
) -> ModelRunner:
    class_name = type(model).__name__
    is_auto = setting == "auto"
    names = [setting]
    if is_auto:
        names = list(FACTORIES)
    refusals: list[str] = []
    reference = ReferenceLogits(UncachedModel(model))
    for name in names:
        try:
            runner = _try_path(name, model, facts, reference, batch_invariant)
        except PathUnavailable as reason:
            refusals.append(f"{name}: {reason}")
            continue
        _log_choice(class_name, name, runner, is_auto, refusals)
        if supports_features:
            runner.features_refusal = features_refusal(runner, UncachedModel(model))
            if runner.features_refusal is not None:
                log.info("%s gives no features on the path %s: %s", class_name, name, runner.features_refusal)
        if name in MODULE_PATHS and model.device.type == "cpu" and facts.num_ranks == 1:
            pack_weights(model, runner, reference)
        return runner
    own = own_cache_refusal(model, facts)
    if own is not None:
        raise ConfigError(f"{class_name} cannot be served: {own}; use another model", param="model")
    raise ConfigError(
        f"{class_name} on {facts.device} in {facts.dtype} cannot be served: {'; '.join(refusals)}; "
        f"use another model, dtype or attention_path{_settings_to_leave_out(facts, batch_invariant)}",
        param="model" if is_auto else "attention_path",
    )


def _log_choice(class_name: str, name: str, runner: ModelRunner, is_auto: bool, refusals: list[str]) -> None:
    as_set = ""
    if not is_auto:
        as_set = ", as set"
    others = ""
    if refusals:
        others = f"; not {', nor '.join(refusals)}"
    log.info("%s takes the path %s%s%s; self-test: %s", class_name, name, as_set, others, describe_self_test(runner))


def _settings_to_leave_out(facts: ModelFacts, batch_invariant: bool) -> str:
    names = []
    if facts.num_ranks > 1:
        names.append("tensor_parallel")
    if batch_invariant:
        names.append("batch_invariant")
    if not names:
        return ""
    return f", or leave out {' and '.join(names)}"


def _try_path(
    name: str, model: PreTrainedModel, facts: ModelFacts, reference: ReferenceLogits, batch_invariant: bool
) -> ModelRunner:
    if model.config.is_encoder_decoder and name != "dense":
        raise PathUnavailable("runs decoder-only models alone")
    log_phase(f"packing weights for the path {name}")
    path = FACTORIES[name](model, facts)
    if batch_invariant and not path.batch_invariant:
        raise PathUnavailable("cannot promise the same bits in every batch (batch_invariant)")
    try:
        runner = _create_tested_runner(path, model, facts, reference)
    except PathUnavailable:
        if name != "dense":
            raise
        runner = _create_tested_runner(_dense_by_columns(model, facts), model, facts, reference)
        log.info("%s numbers its tokens itself: rows of one length run together", type(model).__name__)
    runner.tree_refusal = tree_refusal(runner, reference)
    if runner.tree_refusal is not None:
        log.info("%s runs no token trees on the path %s: %s", type(model).__name__, name, runner.tree_refusal)
    return runner


def _create_tested_runner(
    path: ForwardPath, model: PreTrainedModel, facts: ModelFacts, reference: ReferenceLogits
) -> ModelRunner:
    runner = ModelRunner(path, facts, KVPool(NUM_BLOCKS, path.block_size), model.device)
    log_phase(f"self-test of the path {path.name}")
    runner.self_test_error = check_cache(runner, reference)
    return runner


def pack_weights(model: PreTrainedModel, runner: ModelRunner, reference: ReferenceLogits) -> None:
    """Replace the model's linear layers by layers with packed weights for the CPU. Run the self-test again and, if it
    fails, put the original layers back.

    reference: holds the logits of the self-test that were computed with the original layers.
    """
    num_packed = pack_linears(model)
    if not num_packed:
        return
    try:
        runner.self_test_error = check_cache(runner, reference)
    except PathUnavailable as reason:
        unpack_linears(model)
        log.warning("%s keeps its plain linear layers: packed, it %s", type(model).__name__, reason)
        return
    log.info("%d linear layers of %s have packed weights", num_packed, type(model).__name__)


def tree_refusal(runner: ModelRunner, reference: UncachedModel | ReferenceLogits) -> str | None:
    """Test draft trees on the runner. Return the reason why it cannot verify them, for the log; None if it can.

    `runner.tree_refusal` is set to None for the test; the code that calls this must set it to the result.
    """
    if not isinstance(runner.path, TreePath):
        return "it has no attention of trees"
    reason = layer_memory.tree_refusal(runner.facts.layer_types)
    if reason is not None:
        return reason
    runner.tree_refusal = None  # or it would not be tried
    try:
        error = largest_tree_error(runner, reference)
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:  # whatever a class does with positions or a mask that it does not know
        return f"does not run with them: {type(reason).__name__}: {first_line(reason)}"
    if not error <= TOLERANCE[runner.facts.dtype]:  # NaN fails
        return f"computes other logits than for a chain: largest difference {error:.2e} of the largest logit"
    return None


def features_refusal(runner: ModelRunner, reference: UncachedModel) -> str | None:
    """Test the hidden states that the runner gives to heads. Return the reason why heads cannot read them, for the log;
    None if they can.

    `runner.features_refusal` is set to None for the test; the code that calls this must set it to the result.
    """
    if not isinstance(runner.path, FeaturePath):
        return "it has no taps"
    if runner.facts.decoder_start_ids:
        return "heads are of decoder-only models"
    runner.features_refusal = None  # or it would not be tried
    try:
        error = largest_feature_error(runner, reference)
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:  # whatever a class does that keeps its layers in its own way
        return f"cannot be tapped: {type(reason).__name__}: {first_line(reason)}"
    if not error <= TOLERANCE[runner.facts.dtype]:  # NaN fails
        return f"gives other hidden states than transformers: largest difference {error:.2e} of their length"
    return None


def describe_self_test(runner: ModelRunner) -> str:
    """Return a phrase for the log with two numbers: the largest error of a logit in the runner's self-test, and the
    largest error that is allowed.
    """
    allowed = TOLERANCE[runner.facts.dtype]
    return f"largest difference {runner.self_test_error:.1e} of the largest logit, {allowed:g} allowed"


def check_cache(runner: ModelRunner, reference: ReferenceLogits) -> float:
    """Run the self-test of the runner's KV cache. Return the largest difference of a logit from `reference`, divided by
    the largest logit.

    The runner's pool must have the size for the self-test, with NUM_BLOCKS blocks free. Raises PathUnavailable if the
    model does not run on the cache or the difference is above TOLERANCE; the message names the first layer that is
    wrong, if it is found.
    """
    try:
        error = largest_error(runner, reference)
    except (PathUnavailable, torch.OutOfMemoryError):  # neither is a fault of the cache
        raise
    except Exception as reason:  # whatever a class does with a cache it does not know
        where = _describe_layers(runner.facts, layer_that_raised(reason))
        raise PathUnavailable(
            f"does not run on this cache, {where}: {type(reason).__name__}: {first_line(reason)}"
        ) from reason
    tolerance = TOLERANCE[runner.facts.dtype]
    if not error <= tolerance:  # NaN fails
        where = _describe_layers(runner.facts, layer_that_differs(runner, reference))
        raise PathUnavailable(
            f"computes other logits with this cache than without one, {where}: largest difference {error:.2e} of "
            f"the largest logit, at most {tolerance:.0e} is allowed"
        )
    return error


def _describe_layers(facts: ModelFacts, layer: int | None) -> str:
    # layer 3: "first in layer 3 (full_attention)"; None: "in one of its layers (full_attention, sliding_attention)"
    types = facts.layer_types
    if layer is not None and layer < len(types):
        return f"first in layer {layer} ({types[layer]})"
    return f"in one of its layers ({', '.join(dict.fromkeys(types)) or 'attention'})"
