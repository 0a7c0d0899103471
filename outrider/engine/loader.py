"""From a folder or hub id to a runner that is known to work, or one line saying why not. Called by the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from outrider.engine.kv_pool import KVPool
from outrider.engine.memory import free_memory_bytes
from outrider.engine.model_files import TokenizerFiles, check_folder, first_line, local_folder, tokenizer_files
from outrider.engine.model_runner import ModelFacts, ModelRunner
from outrider.engine.parallel.checks import check_can_split
from outrider.engine.parallel.group import Group
from outrider.engine.paths.choice import choose_path
from outrider.engine.quantize import quantize_int8
from outrider.wire.errors import ConfigError
from outrider.wire.log import get_logger

__all__ = ["TokenizerFiles", "load_runner", "tokenizer_files"]

MIN_CONTEXT = 16
"""Tokens; the self-test needs them."""
DEFAULT_CONTEXT = 2048
"""Tokens, for a model that states no limit (ALiBi)."""

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
    join: Callable[[torch.device], Group] | None = None,
) -> ModelRunner:
    """Load a decoder-only model from safetensors, test it on our cache, size the cache.

    device: cpu, cuda, cuda:N or auto. dtype: float32, bfloat16, float16, or auto (float32 on CPU, the checkpoint's on
    a GPU). kv_cache_tokens None: room for max_slots contexts, at most half of the free memory. attention_path: see
    `paths.choice`. batch_invariant: only a path that promises it. quantization: none or int8.
    join: for tensor_parallel > 1, called once all that can be checked beforehand is; every rank loads by this function.
    Raises ConfigError for anything that cannot be served, naming it.
    """
    torch_device = resolve_device(device)
    folder = local_folder(model)
    if folder is not None:
        check_folder(folder)
    config = _read_config(model)
    _check_class(config)
    limit = _context_limit(config, context_limit)
    group = None
    if tensor_parallel > 1:
        check_can_split(config, tensor_parallel, quantization, batch_invariant)
        assert join is not None
        group = join(torch_device)
    network = _load_weights(model, config, torch_device, dtype, quantization, tensor_parallel)
    facts = _facts(model, network, limit, quantization, tensor_parallel)
    runner = choose_path(network, facts, attention_path, batch_invariant)
    num_blocks = _num_blocks(runner, kv_cache_tokens, max_slots)
    if group is not None:
        group.check_same("attention path", runner.path.name)
        num_blocks = group.smallest(num_blocks)
    _allocate(runner, num_blocks)
    log.info(
        "loaded %s: %s, %d parameters, %s on %s, %s path, %d KV blocks of %d tokens",
        *(model, type(network).__name__, facts.num_parameters, facts.dtype, facts.device),
        *(runner.path.name, num_blocks, runner.path.block_size),
    )
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


def _read_config(model: str) -> PreTrainedConfig:
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


def _context_limit(config: PreTrainedConfig, wanted: int | None) -> int:
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
    return network.to(device)


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
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
        quantization=quantization,
        num_ranks=num_ranks,
    )


def _num_blocks(runner: ModelRunner, kv_cache_tokens: int | None, max_slots: int) -> int:
    """Blocks of the cache: what was asked for, or every slot's whole context within half of the free memory."""
    block_size = runner.path.block_size
    block_bytes, free = runner.kv_bytes_per_token * block_size, free_memory_bytes(runner.device)
    if runner.device.type == "cpu":
        free //= runner.facts.num_ranks  # which all take theirs from the same
    if kv_cache_tokens is not None:
        num_blocks = -(-kv_cache_tokens // block_size)
        if num_blocks * block_bytes > free:
            raise ConfigError(
                f"kv_cache_tokens is {kv_cache_tokens}, which takes {num_blocks * block_bytes} bytes, and "
                f"{runner.facts.device} has {free} free; lower it to at most {free // block_bytes * block_size}",
                param="kv_cache_tokens",
            )
        return num_blocks
    wanted = max_slots * -(-runner.facts.context_limit // block_size)
    affordable = free // 2 // block_bytes
    if affordable < 1:
        raise ConfigError(
            f"no memory for a KV cache: a block takes {block_bytes} bytes; free some or set kv_cache_tokens"
        )
    return min(wanted, affordable)


def _allocate(runner: ModelRunner, num_blocks: int) -> None:
    """At load, so that a worker beside this one does not count the same memory as free, and no request finds out."""
    num_tokens = num_blocks * runner.path.block_size
    num_bytes = num_tokens * runner.kv_bytes_per_token
    runner.set_pool(KVPool(num_blocks, runner.path.block_size))
    try:
        runner.allocate()
    except (RuntimeError, MemoryError) as error:  # torch's own out-of-memory errors are RuntimeErrors
        raise ConfigError(
            f"no memory on {runner.facts.device} for a KV cache of {num_tokens} tokens, {num_bytes} bytes: "
            f"{first_line(error)}; set kv_cache_tokens lower",
            param="kv_cache_tokens",
        ) from error
