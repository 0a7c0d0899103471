"""Compute the size of a runner's KV cache from the settings or the free memory, and allocate it.

Called by the loader of models and by the loader of heads, when the weights are on the device.
"""

from __future__ import annotations

import contextlib

import torch
from transformers import PreTrainedConfig

from outrider.engine import memory
from outrider.engine.architectures.layer_memory import layer_config
from outrider.engine.attention.block_cache import layer_limits, num_decoder_layers
from outrider.engine.attention.forward_path import PreparedPath
from outrider.engine.cuda.step_graphs import WIDTHS
from outrider.engine.files.model_files import first_line
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.attention_choice import MODULE_PATHS
from outrider.engine.memory import MemoryBudget, readable_bytes
from outrider.engine.model_runner import ModelRunner
from outrider.engine.parallel.group import Group
from outrider.engine.step_plan import VERIFY_TOKENS
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import GPU_FRACTION, TargetConfig, WorkerConfig
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

PREFILL_TOKENS_CPU = 256
"""Maximum number of prompt tokens in a step on a CPU, if the setting max_prefill_tokens is None. It is small since the
step also decodes for running requests, whose next tokens wait until the step is done."""
PREFILL_TOKENS_CUDA = 2048
"""Maximum number of prompt tokens in a step on a GPU, if the setting max_prefill_tokens is None."""
ANSWER_TOKENS = 4096
"""Number of tokens per slot for which the KV cache on a CPU is sized, or the context limit if that is smaller. The
slots share the blocks, so one may have more tokens when others have fewer."""
CPU_FRACTION = 0.1
"""Fraction of a CPU machine's free memory, 0 to 1, that the KV cache may take. The draft buffers may take as much
again. The rest is for other processes."""


def default_prefill_tokens(device: torch.device) -> int:
    """Return the maximum number of prompt tokens in a step on this device if max_prefill_tokens is None."""
    if device.type == "cpu":
        return PREFILL_TOKENS_CPU
    return PREFILL_TOKENS_CUDA


def size_cache(
    runner: ModelRunner,
    model_config: PreTrainedConfig,
    num_weight_bytes: int,
    config: WorkerConfig,
    group: Group | None = None,
    num_positions: int = VERIFY_TOKENS,
) -> None:
    """Allocate the runner's KV cache, of the size that the settings state or the free memory allows. Set
    `runner.spare`, the memory that is left for heads.

    model_config: configuration of the model, from whose widths the memory of a step is computed. num_weight_bytes: size
    of the weights on this device, in bytes. group: the ranks of a split model, which all take the size that fits the
    rank with the least memory; None for a whole model. num_positions: number of tokens that each slot feeds to a full
    step. Raises ConfigError if the memory does not suffice.
    """
    # On a CPU no memory is taken yet. Ranks count together: with the lock they would wait for each other forever.
    lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if runner.device.type == "cuda" and group is None:
        lock = memory.hold_memory_lock()
    with lock:
        budget = _compute_budget(runner, model_config, num_weight_bytes, config, num_positions)
        num_blocks = _num_blocks(runner, budget, config)
        if group is not None:
            group.check_same("attention path", runner.path.name)
            num_blocks = group.smallest(num_blocks)
        _allocate(runner, num_blocks)
    runner.spare = budget.spare(num_blocks * runner.path.block_size * runner.kv_bytes_per_token)
    _log_memory(runner, budget, num_positions)


def _compute_budget(
    runner: ModelRunner, model_config: PreTrainedConfig, num_weight_bytes: int, config: WorkerConfig, num_positions: int
) -> MemoryBudget:
    facts = runner.facts
    text = model_config.get_text_config(decoder=True)
    itemsize = getattr(torch, facts.dtype).itemsize
    free_bytes = _free_bytes(runner, num_weight_bytes, config)
    prefill_tokens = config.max_prefill_tokens or default_prefill_tokens(runner.device)
    num_prompt_rows = min(prefill_tokens, config.max_slots * facts.context_limit)
    num_verify_rows = config.max_slots * num_positions
    num_rows = num_prompt_rows + num_verify_rows
    activations_bytes = _logits_bytes(runner, config, num_verify_rows * text.vocab_size)
    if facts.decoder_start_ids:  # a step encodes what its budget has left, and one whole source
        num_rows += facts.context_limit
        activations_bytes += memory.scores_bytes(text, itemsize, facts.context_limit)
    activations_bytes += memory.activations_bytes(text, itemsize, num_rows)
    if runner.path.name in MODULE_PATHS:
        activations_bytes += _masks_bytes(runner, text, itemsize, num_prompt_rows)
    num_tapped = 3 * num_rows  # a tap as its layer leaves it, beside the other taps of the step, and of the step before
    graphs_bytes = 0
    if isinstance(runner.path, PreparedPath):
        widest = config.max_slots * max(WIDTHS)
        # Each graph keeps taps of its own. There is one for max_slots, one for half as many, and so on: twice in all.
        num_tapped += 2 * config.max_slots * sum(WIDTHS)
        graphs_bytes = memory.activations_bytes(text, itemsize, widest) + memory.logits_bytes(widest * text.vocab_size)
    tap_bytes = num_tapped * text.hidden_size * itemsize
    return MemoryBudget(num_weight_bytes, activations_bytes, free_bytes, graphs_bytes, tap_bytes)


def _free_bytes(runner: ModelRunner, num_weight_bytes: int, config: WorkerConfig) -> int:
    if runner.device.type == "cpu":
        return memory.free_memory_bytes(runner.device) // runner.facts.num_ranks  # all ranks use the same memory
    utilization = config.gpu_memory_utilization
    if runner.device.type == "cuda" and config.kv_cache_tokens is None and utilization is not None:
        return memory.shared_memory_bytes(runner.device, utilization, num_weight_bytes)
    return memory.free_memory_bytes(runner.device)


def _logits_bytes(runner: ModelRunner, config: WorkerConfig, num_logits: int) -> int:
    if runner.device.type == "cuda" and isinstance(config, TargetConfig):  # verdicts are computed on the device
        return memory.decision_bytes(num_logits)
    return memory.logits_bytes(num_logits)


def _masks_bytes(runner: ModelRunner, text: PreTrainedConfig, itemsize: int, num_rows: int) -> int:
    # a mask for each window of a layer, and the scores of an indexer, which some layers choose their keys by
    num_copies = 1
    num_layers = num_decoder_layers(text)
    if runner.device.type == "cpu":  # query heads that share a KV head have a mask each
        num_copies = max(_num_sharing(layer_config(text, index)) for index in range(num_layers))
    limits = {layer_limits(text, index) for index in range(num_layers)}
    num_index_heads = getattr(text, "index_n_heads", 0)
    context_limit = runner.facts.context_limit
    index_scores_bytes = memory.index_scores_bytes(num_index_heads, num_rows, context_limit)
    return memory.masks_bytes(limits, num_copies * itemsize, num_rows, context_limit) + index_scores_bytes


def _num_sharing(layer: PreTrainedConfig) -> int:
    # 32 query heads, 8 KV heads: 4 query heads share a KV head
    num_heads: int = layer.num_attention_heads
    return num_heads // (getattr(layer, "num_key_value_heads", None) or num_heads)


def _num_blocks(runner: ModelRunner, budget: MemoryBudget, config: WorkerConfig) -> int:
    block_size = runner.path.block_size
    block_bytes = runner.kv_bytes_per_token * block_size
    kv_cache_tokens = config.kv_cache_tokens
    if kv_cache_tokens is None:
        fraction = config.kv_cache_fraction or _default_fraction(runner, config)
        return budget.num_blocks(block_bytes, _num_useful_blocks(runner, config), fraction)
    num_blocks = -(-kv_cache_tokens // block_size)
    if num_blocks < runner.facts.num_sequences:
        raise ConfigError(
            f"kv_cache_tokens is {kv_cache_tokens}, one block of {block_size} tokens, and an encoder-decoder model's "
            f"request takes two at least: set it to {2 * block_size} or more",
            param="kv_cache_tokens",
        )
    max_tokens = budget.free_bytes // block_bytes * block_size
    budget.check(kv_cache_tokens, num_blocks * block_bytes, max_tokens, runner.facts.device)
    return num_blocks


def _num_useful_blocks(runner: ModelRunner, config: WorkerConfig) -> int:
    """Return the blocks with which all slots can be full, and one request can have the whole context."""
    block_size = runner.path.block_size
    context_limit = runner.facts.context_limit
    slot_tokens = context_limit
    if runner.device.type == "cpu":
        slot_tokens = min(context_limit, ANSWER_TOKENS)
    num_blocks = max(config.max_slots * -(-slot_tokens // block_size), -(-context_limit // block_size))
    return num_blocks * runner.facts.num_sequences


def _default_fraction(runner: ModelRunner, config: WorkerConfig) -> float:
    if runner.device.type == "cpu":
        return CPU_FRACTION
    if config.gpu_memory_utilization is None:
        return GPU_FRACTION
    return 1.0  # _free_bytes has left out what gpu_memory_utilization leaves to others


def _log_memory(runner: ModelRunner, budget: MemoryBudget, num_positions: int) -> None:
    num_tokens = runner.pool.num_blocks * runner.pool.block_size
    num_bytes = num_tokens * runner.kv_bytes_per_token
    log.info(
        "memory on %s: weights %s, KV cache %s for %d tokens (%.0f %% of the %s free beside the weights), "
        "about %s for a full step of %d tokens a slot, %s left",
        runner.facts.device,
        readable_bytes(budget.weights_bytes),
        readable_bytes(num_bytes),
        num_tokens,
        100 * num_bytes / max(budget.free_bytes, 1),
        readable_bytes(budget.free_bytes),
        readable_bytes(budget.activations_bytes),
        num_positions,
        readable_bytes(runner.spare.num_bytes),
    )
    max_tokens = runner.facts.context_limit * runner.facts.num_sequences
    if num_tokens < max_tokens:
        log.warning(
            "the KV cache holds %d tokens and a request may have %d: longer ones will be refused; raise "
            "kv_cache_tokens",
            num_tokens,
            max_tokens,
        )


def _allocate(runner: ModelRunner, num_blocks: int) -> None:
    # A GPU's memory is taken now, so that no other process counts it as free; a CPU's as it is used.
    num_tokens = num_blocks * runner.path.block_size
    num_bytes = num_tokens * runner.kv_bytes_per_token
    try:
        runner.set_pool(KVPool(num_blocks, runner.path.block_size))
        if not runner.kv_bytes_per_token:  # the shape of a layer is known when keys of its own reach it
            runner.allocate()
    except (RuntimeError, MemoryError, OSError) as error:  # torch's own out-of-memory errors are RuntimeErrors
        raise ConfigError(
            f"no memory on {runner.facts.device} for a KV cache of {num_tokens} tokens, {num_bytes} bytes: "
            f"{first_line(error)}; set kv_cache_tokens lower",
            param="kv_cache_tokens",
        ) from error
