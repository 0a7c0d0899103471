"""From a folder or hub id to a runner that is known to work, or one line saying why not. Called by the workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from outrider.engine import memory
from outrider.engine.kv_pool import KVPool
from outrider.engine.memory import Budget, readable_bytes
from outrider.engine.model_files import TokenizerFiles, check_folder, first_line, tokenizer_files
from outrider.engine.model_runner import ModelFacts, ModelRunner
from outrider.engine.parallel.checks import check_can_split
from outrider.engine.parallel.group import Group
from outrider.engine.paths.choice import choose_path
from outrider.engine.paths.forward_path import Repacks
from outrider.engine.quantize import num_parameters, quantize_int8
from outrider.engine.quantized_checkpoints import check_readable, method_of
from outrider.engine.rope import settle_rope
from outrider.wire.errors import ConfigError
from outrider.wire.log import get_logger
from outrider.wire.model_id import local_folder

__all__ = ["TokenizerFiles", "load_runner", "tokenizer_files"]

MIN_CONTEXT = 16
"""Tokens; the self-test needs them."""
DEFAULT_CONTEXT = 2048
"""Tokens, for a model that states no limit (ALiBi)."""

PREFILL_TOKENS_CPU = 256
PREFILL_TOKENS_CUDA = 2048
VERIFY_TOKENS = 6
"""Positions of a slot in a full step, for the estimate of its memory: the default K and one."""

log = get_logger(__name__)


def load_runner(
    model: str,
    *,
    device: str,
    dtype: str,
    kv_cache_tokens: int | None,
    max_slots: int,
    context_limit: int | None,
    attention_path: str = "auto",
    batch_invariant: bool = False,
    quantization: str = "none",
    tensor_parallel: int = 1,
    kv_cache_fraction: float = 0.5,
    max_prefill_tokens: int | None = None,
    join: Callable[[torch.device], Group] | None = None,
) -> ModelRunner:
    """Load a decoder-only model from safetensors, test it on our cache, size the cache.

    device: cpu, cuda, cuda:N or auto. dtype: float32, bfloat16, float16, or auto (float32 on CPU, the checkpoint's on
    a GPU). kv_cache_tokens None: room for max_slots contexts, at most kv_cache_fraction of the free memory.
    attention_path: see `paths.choice`. max_prefill_tokens: prompt tokens of a step, None = the device's default.
    batch_invariant: only a path that promises it. quantization: none or int8.
    join: for tensor_parallel > 1, called once all that can be checked beforehand is; every rank loads by this function.
    Raises ConfigError for anything that cannot be served, naming it.
    """
    torch_device = resolve_device(device)
    folder = local_folder(model)
    if folder is not None:
        check_folder(folder)
    config = read_config(model)
    _check_class(config)
    limit = context_limit_of(config, context_limit)
    check_readable(model, config, torch_device, quantization)
    quantization = method_of(config) or quantization
    group = None
    if tensor_parallel > 1:
        check_can_split(config, tensor_parallel, quantization, batch_invariant)
        assert join is not None
        group = join(torch_device)
    network = _load_weights(model, config, torch_device, dtype, quantization, tensor_parallel)
    facts = _facts(model, network, limit, quantization, tensor_parallel)
    settle_rope(network, limit)
    num_weight_bytes, class_name = memory.weights_bytes(network), type(network).__name__
    runner = choose_path(network, facts, attention_path, batch_invariant)
    del network  # before free memory is counted: a path with weights of its own form does not keep it
    if isinstance(runner.path, Repacks):
        num_weight_bytes = runner.path.weights_bytes
    # Ranks count together instead: each would hold up the others, and they it.
    with memory.in_turn() if group is None else contextlib.nullcontext():
        budget = _budget(runner, config, num_weight_bytes, max_slots, max_prefill_tokens)
        num_blocks = _num_blocks(runner, budget, kv_cache_tokens, max_slots, kv_cache_fraction)
        if group is not None:
            group.check_same("attention path", runner.path.name)
            num_blocks = group.smallest(num_blocks)
        _allocate(runner, num_blocks)
    log.info(
        "loaded %s: %s, %d parameters, %s on %s, %s path, %d KV blocks of %d tokens",
        *(model, class_name, facts.num_parameters, facts.dtype, facts.device),
        *(runner.path.name, num_blocks, runner.path.block_size),
    )
    _log_memory(runner, budget)
    return runner


def resolve_device(device: str) -> torch.device:
    """Raises ConfigError when there is no such device here."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device is {device!r}, must be cpu, cuda, cuda:N or auto", param="device") from None
    if resolved.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if resolved.type != "cuda" or (resolved.index or 0) >= count:
        raise ConfigError(f"device is {device!r}, this process sees {count} CUDA devices; use cpu", param="device")
    return torch.device("cuda", resolved.index or 0)


def read_config(model: str) -> PreTrainedConfig:
    """Raises ConfigError."""
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the configuration of {model}: {first_line(error)}", param="model") from None


def _check_class(config: PreTrainedConfig) -> None:
    """Refuse what cannot be rolled back or has no causal class, before its weights are read."""
    name = (config.architectures or [type(config).__name__])[0]
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder-decoder model; only decoder-only models are served", param="model")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"{name} is no causal language model of transformers {transformers.__version__}")
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    layer_types = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    stateful = sorted(layer_types - {"full_attention", "sliding_attention", "chunked_attention"})
    if getattr(model_class, "_is_stateful", False) or stateful:
        raise ConfigError(
            f"{name} keeps a running state{f' ({stateful[0]} layers)' if stateful else ''} that cannot be rolled back "
            "to an earlier token, which speculative decoding needs; use an attention-only model",
            param="model",
        )


def context_limit_of(config: PreTrainedConfig, wanted: int | None) -> int:
    """Tokens, of what the model was made for. Raises ConfigError when `wanted` does not fit."""
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    own = next((n for name in names if isinstance(n := getattr(text, name, None), int) and n > 0), None)
    limit = wanted or own or DEFAULT_CONTEXT
    if own is not None and limit > own:
        raise ConfigError(f"context_limit is {limit}, the model was made for {own}", param="context_limit")
    if limit < MIN_CONTEXT:
        raise ConfigError(f"context_limit is {limit}, must be at least {MIN_CONTEXT}", param="context_limit")
    return limit


def _load_weights(
    model: str, config: PreTrainedConfig, device: torch.device, dtype: str, quantization: str, num_ranks: int
) -> PreTrainedModel:
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    wanted: Any = getattr(torch, dtype) if dtype != "auto" else (torch.float32 if device.type == "cpu" else "auto")
    options: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, "attn_implementation": attention}
    if num_ranks > 1:
        options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=num_ranks)
    is_quantised = method_of(config) is not None
    if is_quantised and device.type == "cuda":
        options["device_map"] = {"": device}  # some methods read nowhere else, and cannot be moved
    transformers.utils.logging.disable_progress_bar()  # a worker's stderr is a log
    try:
        network, info = AutoModelForCausalLM.from_pretrained(
            model, config=config, dtype=wanted, output_loading_info=True, **options
        )
    except Exception as error:  # safetensors, json and torch each raise their own for a damaged file
        raise ConfigError(f"cannot load {model}: {first_line(error)}", param="model") from error
    missing = sorted(info["missing_keys"]) + sorted(str(entry) for entry in info["mismatched_keys"])
    if missing:
        raise ConfigError(
            f"the weights of {model} lack {len(missing)} tensors of {type(network).__name__}, first {missing[0]}",
            param="model",
        )
    network.config.pad_token_id = None  # some classes search every input for it, which waits for the device
    network = network.eval().requires_grad_(False)
    if quantization == "int8":
        quantize_int8(network)  # before the weights go to the device, which then never holds them whole
    return network if is_quantised else network.to(device)


def _facts(model: str, network: PreTrainedModel, context_limit: int, quantization: str, num_ranks: int) -> ModelFacts:
    generation = getattr(network, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = network.config.get_text_config(decoder=True).eos_token_id
    head = network.get_output_embeddings()
    return ModelFacts(
        model_id=model,
        vocab_size=network.config.get_text_config(decoder=True).vocab_size if head is None else head.weight.shape[0],
        context_limit=context_limit,
        dtype=str(network.dtype).removeprefix("torch."),
        device=str(network.device),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        num_parameters=num_parameters(network),
        quantization=quantization,
        num_ranks=num_ranks,
    )


def default_prefill_tokens(device: torch.device) -> int:
    """Prompt tokens of a step where the settings name none."""
    return PREFILL_TOKENS_CPU if device.type == "cpu" else PREFILL_TOKENS_CUDA


def _budget(
    runner: ModelRunner, config: PreTrainedConfig, num_weight_bytes: int, max_slots: int, prefill_tokens: int | None
) -> Budget:
    facts = runner.facts
    free = memory.free_memory_bytes(runner.device)
    if runner.device.type == "cpu":
        free //= facts.num_ranks  # which all take theirs from the same
    verified = max_slots * VERIFY_TOKENS
    prompt = min(prefill_tokens or default_prefill_tokens(runner.device), max_slots * facts.context_limit)
    tokens = prompt + verified
    itemsize = getattr(torch, facts.dtype).itemsize
    activations = memory.activations_bytes(config.get_text_config(decoder=True), itemsize, tokens, verified)
    return Budget(num_weight_bytes, activations, free)


def _num_blocks(
    runner: ModelRunner, budget: Budget, kv_cache_tokens: int | None, max_slots: int, fraction: float
) -> int:
    """Blocks of the cache: what was asked for, or every slot's whole context within a fraction of the free memory."""
    block_size = runner.path.block_size
    block_bytes = runner.kv_bytes_per_token * block_size
    if kv_cache_tokens is None:
        return budget.num_blocks(block_bytes, max_slots * -(-runner.facts.context_limit // block_size), fraction)
    num_blocks = -(-kv_cache_tokens // block_size)
    most_tokens = budget.free_bytes // block_bytes * block_size
    budget.check(kv_cache_tokens, num_blocks * block_bytes, most_tokens, runner.facts.device)
    return num_blocks


def _log_memory(runner: ModelRunner, budget: Budget) -> None:
    num_tokens = runner.pool.num_blocks * runner.pool.block_size
    num_bytes = num_tokens * runner.kv_bytes_per_token
    log.info(
        "memory on %s: weights %s, KV cache %s for %d tokens (%.0f %% of the %s free beside the weights), "
        "about %s for a full step of %d tokens a slot",
        *(runner.facts.device, readable_bytes(budget.weights_bytes), readable_bytes(num_bytes), num_tokens),
        *(100 * num_bytes / max(budget.free_bytes, 1), readable_bytes(budget.free_bytes)),
        *(readable_bytes(budget.activations_bytes), VERIFY_TOKENS),
    )
    if num_tokens < runner.facts.context_limit:
        log.warning(
            "the KV cache holds %d tokens and a context has %d: longer requests will be refused; raise kv_cache_tokens",
            *(num_tokens, runner.facts.context_limit),
        )


def _allocate(runner: ModelRunner, num_blocks: int) -> None:
    """At load, so that who sizes a cache next does not count the same memory as free, and no request finds out."""
    num_tokens = num_blocks * runner.path.block_size
    num_bytes = num_tokens * runner.kv_bytes_per_token
    try:
        runner.set_pool(KVPool(num_blocks, runner.path.block_size))
        runner.allocate()
    except (RuntimeError, MemoryError) as error:  # torch's own out-of-memory errors are RuntimeErrors
        raise ConfigError(
            f"no memory on {runner.facts.device} for a KV cache of {num_tokens} tokens, {num_bytes} bytes: "
            f"{first_line(error)}; set kv_cache_tokens lower",
            param="kv_cache_tokens",
        ) from error
