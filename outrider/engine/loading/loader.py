"""Load a folder or hub id into a runner that is known to work, or raise one line saying why not."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.distributed import DistributedConfig
from transformers.utils import is_accelerate_available

from outrider.engine import memory
from outrider.engine.architectures.context import context_limit_of, settle_rope
from outrider.engine.architectures.layer_memory import layer_config, layer_types, memory_refusal
from outrider.engine.architectures.positions import number_every_token, within_tables
from outrider.engine.architectures.text_part import attention_of_text, part_that_writes, plain_form, served_class
from outrider.engine.attention.block_cache import layer_limits, num_decoder_layers
from outrider.engine.attention.forward_path import Prepares, Repacks
from outrider.engine.cuda.step_graphs import WIDTHS
from outrider.engine.files.ends import decoder_start_of, read_ends, read_generation
from outrider.engine.files.gguf_files import read_gguf_config
from outrider.engine.files.model_files import (
    CONFIG,
    check_folder,
    check_no_adapter,
    config_name,
    first_line,
    gguf_path,
    model_file,
    read_model_json,
    unusable,
)
from outrider.engine.files.tied_tables import check_tied_weights
from outrider.engine.files.weight_headers import bounded_build, check_counts, read_headers
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.attention_choice import MODULE_PATHS, choose_path
from outrider.engine.loading.lookahead_embeddings import append_embeddings
from outrider.engine.loading.weight_source import WeightSource
from outrider.engine.memory import Budget, readable_bytes
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.parallel.checks import check_can_split
from outrider.engine.parallel.group import Group
from outrider.engine.quantization.quantize import check_int8, method_of, num_parameters, quantize_int8
from outrider.engine.step_plan import VERIFY_TOKENS
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import full_name, local_path
from outrider.wire.peer_text import bound_text
from outrider.wire.settings.config import GPU_FRACTION, TargetConfig, WorkerConfig
from outrider.wire.settings.gpu_shares import num_weight_bytes
from outrider.wire.telemetry.log import get_logger
from outrider.wire.telemetry.phases import log_phase

log = get_logger(__name__)

PREFILL_TOKENS_CPU = 256
"""Most prompt tokens of a step on a CPU: running requests wait for the whole of it."""
PREFILL_TOKENS_CUDA = 2048
"""Most prompt tokens of a step on a GPU, as PREFILL_TOKENS_CPU."""
ANSWER_TOKENS = 4096
"""Tokens of a slot that the cache has room for on a CPU, where contexts are longer."""
CPU_FRACTION = 0.1
"""Share of a CPU's free memory for the cache, and for what drafts deliver: other processes need theirs."""


def load_runner(config: WorkerConfig, join: Callable[[torch.device], Group] | None = None) -> ModelRunner:
    """Load a model of text, with an encoder or without, from safetensors; test it on our cache, size the cache.

    join: for tensor_parallel > 1, called once everything that needs no other rank is checked; every rank loads by this
    function. Raises ConfigError for anything that cannot be served, naming it.
    """
    device = resolve_device(config.device)
    with memory.fits(config.model, device):
        return _load(config, device, join)


def _load(config: WorkerConfig, device: torch.device, join: Callable[[torch.device], Group] | None) -> ModelRunner:
    path = local_path(config.model)
    if path is not None and path.is_dir():
        check_folder(path)
    made_of = read_config(config.model)
    check_class(made_of)
    limit = context_limit_of(made_of, config.context_limit)
    generation = read_generation(config.model, made_of)
    ends = read_ends(config.model, made_of)
    if ends.difference is not None:
        log.warning("%s", ends.difference)
    stored_as = method_of(made_of)
    source = WeightSource.find(config.model, made_of, device, config.quantization)
    made_of = source.config
    unloaded = check_weights(config.model, made_of, source)
    limit = within_tables(unloaded, limit, config.context_limit)
    source.check_memory(config, unloaded, device)
    check_int8(device, config.quantization)
    quantization = method_of(made_of) or config.quantization
    num_ranks = config.tensor_parallel if isinstance(config, TargetConfig) else 1
    group = None
    if num_ranks > 1:
        packed_as = "gguf" if source.gguf else stored_as
        check_can_split(made_of, num_ranks, packed_as or quantization, config.batch_invariant)
        assert join is not None
        group = join(device)
    log_phase(_reading(config.model))
    network = _load_weights(source, device, config.dtype, quantization, num_ranks)
    facts = _facts(config.model, network, generation, ends.ids, limit, quantization, num_ranks)
    facts = replace(facts, is_text_part=served_class(made_of).is_text_part)
    settle_rope(network, limit)
    if isinstance(config, TargetConfig) and config.lookahead_embeddings is not None:
        facts = replace(facts, num_lookahead=append_embeddings(network, config.lookahead_embeddings))
    num_weight_bytes = memory.weights_bytes(network)
    class_name = type(network).__name__
    gives_features = isinstance(config, TargetConfig)
    runner = choose_path(network, facts, config.attention_path, config.batch_invariant, gives_features)
    del network  # before free memory is counted: a path with weights of its own form does not keep it
    if isinstance(runner.path, Repacks):
        num_weight_bytes = runner.path.weights_bytes
    runner.num_weight_bytes = num_weight_bytes
    size_cache(runner, made_of, num_weight_bytes, config, group)
    log.info(
        "loaded %s%s: %s, %d parameters, %s on %s, %s path, %d KV blocks of %d tokens",
        config.model,
        ", text only" if facts.is_text_part else "",
        class_name,
        facts.num_parameters,
        facts.dtype,
        facts.device,
        runner.path.name,
        runner.pool.num_blocks,
        runner.path.block_size,
    )
    return runner


def _reading(model: str) -> str:
    """Say that a model's weights are read now, and how much that is."""
    path = local_path(model)
    num_bytes = path.stat().st_size if path is not None and path.is_file() else num_weight_bytes(model)
    if num_bytes is not None:
        return f"reading weights, {num_bytes / 1e6:,.0f} MB"
    return "reading weights" if path is not None else "fetching weights from the hub, and reading them"


def size_cache(
    runner: ModelRunner,
    made_of: PreTrainedConfig,
    num_weight_bytes: int,
    config: WorkerConfig,
    group: Group | None = None,
    num_positions: int = VERIFY_TOKENS,
) -> None:
    """Give the runner the cache that the settings or the free memory allow. Raises ConfigError when there is no room.

    made_of: the configuration whose widths tell what a step takes. num_positions: of a slot in a full step.
    """
    # On a CPU nothing is taken yet. Ranks count together instead: with the lock they would wait for each other forever.
    with memory.in_turn() if runner.device.type == "cuda" and group is None else contextlib.nullcontext():
        budget = _budget(runner, made_of, num_weight_bytes, config, num_positions)
        num_blocks = _num_blocks(runner, budget, config)
        if group is not None:
            group.check_same("attention path", runner.path.name)
            num_blocks = group.smallest(num_blocks)
        _allocate(runner, num_blocks)
    runner.spare = budget.spare(num_blocks * runner.path.block_size * runner.kv_bytes_per_token)
    _log_memory(runner, budget, num_positions)


def keep_soft_caps(config: PreTrainedConfig) -> None:
    """Have transformers compute attention with the soft caps that a model was trained with: where the choice is its
    own, some classes take an attention that leaves them out (all of Gemma 2's before 5.21).
    """
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        config._attn_implementation = "eager"


def resolve_device(device: str) -> torch.device:
    """Return the device of the setting. Raises ConfigError when there is no such device here."""
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
    """Read the configuration of a folder, GGUF file or hub id. Raises ConfigError."""
    check_no_adapter(model)
    gguf = gguf_path(model)
    raw = read_model_json(model, CONFIG)
    if raw is not None:  # else transformers says what is missing
        check_counts(raw, str(model_file(model, CONFIG)))
    try:
        if gguf is None:
            config = part_that_writes(AutoConfig.from_pretrained(model, trust_remote_code=False))
        else:
            config = read_gguf_config(gguf)
        if not all(isinstance(name, str) for name in config.architectures or ()):
            raise ValueError(f"architectures is {config.architectures}, must be a list of names")
        if getattr(config, "transformers_weights", None) is not None:
            raise ValueError("transformers_weights names other weights than model.safetensors; leave it out")
        config._attn_implementation = config._experts_implementation = None  # a file may name code on the hub here
        keep_soft_caps(config)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError) as error:
        version = transformers.__version__
        raise ConfigError(
            f"cannot read the configuration of {model} with transformers {version}: {first_line(error)}", param="model"
        ) from None
    except Exception as error:  # transformers computes with what it reads, and raises whatever comes of that
        raise unusable(model, error) from error
    try:
        num_layers = num_decoder_layers(config)
    except Exception as error:
        served_class(config)  # what writes no text is refused for that
        name = bound_text((config.architectures or [type(config).__name__])[0])
        raise ConfigError(
            f"{name} has no one decoder whose layers config.json counts (num_hidden_layers), so what it keeps of a "
            "token is not known; use another model",
            param="model",
        ) from error
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ConfigError(f"{config_name(model)} says {num_layers!r} layers, must be at least 1", param="model")
    return config


def check_weights(model: str, config: PreTrainedConfig, source: WeightSource | None = None) -> PreTrainedModel:
    """Compare the configuration with the headers of the weights; return the network on the meta device.

    source: as a device takes them; None = as they are stored. Raises ConfigError for what the files do not hold, before
    any of it is built.
    """
    source = source or WeightSource.as_stored(model, config)
    headers = read_headers(model)
    try:
        with bounded_build(config_name(model), len(headers)):
            network: PreTrainedModel = network_class(config)(config)
    except ConfigError:
        raise
    except Exception as error:  # as in read_config
        raise unusable(model, error) from error
    if not any("past_key_values" in inspect.signature(module.forward).parameters for module in network.modules()):
        raise ConfigError(
            f"{type(network).__name__} keeps no cache of transformers' (past_key_values): each token would compute the "
            "whole text anew; use another model",
            param="model",
        )
    source.check(network, headers)
    return network


def check_class(config: PreTrainedConfig) -> None:
    """Refuse what has no class that writes text, or layers whose memory is not served, before weights are read."""
    name = bound_text((config.architectures or [type(config).__name__])[0])
    model_class = network_class(config)
    try:
        types = layer_types(config)
    except Exception as error:  # as in read_config
        raise unusable(config.name_or_path, error) from error
    refusal = memory_refusal(types, is_stateful=getattr(model_class, "_is_stateful", False))
    if refusal is not None:
        raise ConfigError(f"{name} {refusal}", param="model")


def network_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class for a configuration that `check_class` lets through."""
    return served_class(config).model_class


def _load_weights(
    source: WeightSource, device: torch.device, dtype: str, quantization: str, num_ranks: int
) -> PreTrainedModel:
    model = source.model
    config = source.config
    model_class = network_class(config)
    attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    options: dict[str, Any] = {"trust_remote_code": False}
    options["attn_implementation"] = attention_of_text(config, attention)
    if num_ranks > 1:
        options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=num_ranks)
    is_quantised = method_of(config) is not None
    if device.type == "cuda" and (is_quantised or (num_ranks == 1 and is_accelerate_available())):
        options["device_map"] = {"": device}  # each tensor is read onto it: the host never holds them all
    transformers.utils.logging.disable_progress_bar()  # a worker's stderr is a log
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # what is missing is one line below
    try:
        with source.reading():
            place, own = source.arguments(source.dtype(device, dtype))
            network, info = model_class.from_pretrained(place, output_loading_info=True, **own, **options)
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except Exception as error:  # safetensors, json and torch each raise their own for a damaged file
        raise ConfigError(f"cannot load {model}: {first_line(error)}", param="model") from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    missing = sorted(info["missing_keys"]) + sorted(str(entry) for entry in info["mismatched_keys"])
    if missing:
        raise ConfigError(
            f"the weights of {model} lack {len(missing)} tensors of {type(network).__name__}, first {missing[0]}",
            param="model",
        )
    check_tied_weights(model, network)
    network = network.eval().requires_grad_(False)
    if served_class(config).is_text_part:
        network = plain_form(network)
    if not config.is_encoder_decoder:  # some encoders make padding of their own
        # Some classes search every input for it, which waits for the device; some take no None for it.
        vars(network.config)["pad_token_id"] = None
    number_every_token(network)
    if quantization == "int8":
        quantize_int8(network)
    return network if is_quantised else network.to(device)  # not moved where they are there already


def _facts(
    model: str,
    network: PreTrainedModel,
    generation: GenerationConfig,
    end_ids: tuple[int, ...],
    context_limit: int,
    quantization: str,
    num_ranks: int,
) -> ModelFacts:
    head = network.get_output_embeddings()
    return ModelFacts(
        model_id=full_name(model),
        vocab_size=network.config.get_text_config(decoder=True).vocab_size if head is None else head.weight.shape[0],
        context_limit=context_limit,
        dtype=str(network.dtype).removeprefix("torch."),
        device=str(network.device),
        eos_token_ids=end_ids,
        num_parameters=num_parameters(network),
        quantization=quantization,
        num_ranks=num_ranks,
        num_layers=num_decoder_layers(network.config),
        layer_types=layer_types(network.config),
        hidden_size=network.config.get_text_config(decoder=True).hidden_size,
        decoder_start_ids=decoder_start_of(network.config, generation),
    )


def default_prefill_tokens(device: torch.device) -> int:
    """Return the most prompt tokens of a step where the settings name none."""
    return PREFILL_TOKENS_CPU if device.type == "cpu" else PREFILL_TOKENS_CUDA


def _budget(
    runner: ModelRunner, made_of: PreTrainedConfig, num_weight_bytes: int, config: WorkerConfig, num_positions: int
) -> Budget:
    facts, text = runner.facts, made_of.get_text_config(decoder=True)
    utilization = config.gpu_memory_utilization if config.kv_cache_tokens is None else None
    if runner.device.type == "cuda" and utilization is not None:
        free = memory.shared_memory_bytes(runner.device, utilization, num_weight_bytes)
    else:
        free = memory.free_memory_bytes(runner.device)
    if runner.device.type == "cpu":
        free //= facts.num_ranks  # all ranks take their share of the same memory
    verified = config.max_slots * num_positions
    prefill_tokens = config.max_prefill_tokens or default_prefill_tokens(runner.device)
    prompt = min(prefill_tokens, config.max_slots * facts.context_limit)
    tokens = prompt + verified
    itemsize = getattr(torch, facts.dtype).itemsize
    encoder = 0
    if facts.decoder_start_ids:  # a step encodes what its budget has left and one whole source
        tokens += facts.context_limit
        encoder = memory.scores_bytes(text, itemsize, facts.context_limit)
    decides_here = runner.device.type == "cuda" and isinstance(config, TargetConfig)
    logits_bytes = memory.decision_bytes if decides_here else memory.logits_bytes
    activations = memory.activations_bytes(text, itemsize, tokens) + logits_bytes(verified * text.vocab_size) + encoder
    graphs, tapped = 0, 3 * tokens  # as a layer leaves them, side by side with other taps, and those that stay
    if isinstance(runner.path, Prepares):
        widest = config.max_slots * max(WIDTHS)
        # Each graph has its own: of so many slots, half as many, and so on.
        tapped += 2 * config.max_slots * sum(WIDTHS)
        graphs = memory.activations_bytes(text, itemsize, widest) + memory.logits_bytes(widest * text.vocab_size)
    if runner.path.name in MODULE_PATHS:
        activations += _masks_bytes(runner, text, itemsize, prompt)
    return Budget(num_weight_bytes, activations, free, graphs, tapped * text.hidden_size * itemsize)


def _masks_bytes(runner: ModelRunner, text: PreTrainedConfig, itemsize: int, num_tokens: int) -> int:
    """Return the bytes of the masks of pieces of prompts of so many tokens, and of an indexer's scores of them."""
    num_copies, num_layers = 1, num_decoder_layers(text)
    if runner.device.type == "cpu":  # where each of the query heads that share a KV head has one
        num_copies = max(_num_sharing(layer_config(text, index)) for index in range(num_layers))
    limits = {layer_limits(text, index) for index in range(num_layers)}
    num_index_heads = getattr(text, "index_n_heads", 0)
    context = runner.facts.context_limit
    index_scores = memory.index_scores_bytes(num_index_heads, num_tokens, context)
    return memory.masks_bytes(limits, num_copies * itemsize, num_tokens, context) + index_scores


def _num_sharing(layer: PreTrainedConfig) -> int:
    """Return how many query heads share a KV head."""
    num_heads: int = layer.num_attention_heads
    return num_heads // (getattr(layer, "num_key_value_heads", None) or num_heads)


def _num_blocks(runner: ModelRunner, budget: Budget, config: WorkerConfig) -> int:
    """Return the blocks asked for, or those that the slots may use within a fraction of the free memory."""
    block_size = runner.path.block_size
    block_bytes = runner.kv_bytes_per_token * block_size
    kv_cache_tokens = config.kv_cache_tokens
    if kv_cache_tokens is None:
        on_cpu, context = runner.device.type == "cpu", runner.facts.context_limit
        slot_tokens = min(context, ANSWER_TOKENS) if on_cpu else context
        wanted = max(config.max_slots * -(-slot_tokens // block_size), -(-context // block_size))
        wanted *= runner.facts.num_sequences
        of_gpu = GPU_FRACTION if config.gpu_memory_utilization is None else 1.0  # which leaves the rest out already
        fraction = config.kv_cache_fraction or (CPU_FRACTION if on_cpu else of_gpu)
        return budget.num_blocks(block_bytes, wanted, fraction)
    num_blocks = -(-kv_cache_tokens // block_size)
    if num_blocks < runner.facts.num_sequences:
        raise ConfigError(
            f"kv_cache_tokens is {kv_cache_tokens}, one block of {block_size} tokens, and an encoder-decoder model's "
            f"request takes two at least: set it to {2 * block_size} or more",
            param="kv_cache_tokens",
        )
    most_tokens = budget.free_bytes // block_bytes * block_size
    budget.check(kv_cache_tokens, num_blocks * block_bytes, most_tokens, runner.facts.device)
    return num_blocks


def _log_memory(runner: ModelRunner, budget: Budget, num_positions: int) -> None:
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
    most_tokens = runner.facts.context_limit * runner.facts.num_sequences
    if num_tokens < most_tokens:
        log.warning(
            "the KV cache holds %d tokens and a request may have %d: longer ones will be refused; raise "
            "kv_cache_tokens",
            num_tokens,
            most_tokens,
        )


def _allocate(runner: ModelRunner, num_blocks: int) -> None:
    """Reserve the cache. A GPU's memory is taken now, so that nobody else counts it as free; a CPU's as it is used."""
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
