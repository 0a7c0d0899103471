"""Load a model from a folder, GGUF file or hub id into a runner that passed its self-test.

`load_runner` is called by workers with a model, by training and by `outrider alpha`. The checks before it
(`read_config`, `check_class`, `check_weights`) read no weights; the loader of heads and `outrider doctor` call them,
too.
"""

from __future__ import annotations

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

from outrider.engine import memory
from outrider.engine.architectures.context import context_limit_of, settle_rope
from outrider.engine.architectures.layer_memory import layer_types, memory_refusal
from outrider.engine.architectures.positions import limit_to_position_tables
from outrider.engine.architectures.text_part import served_class, text_generating_part
from outrider.engine.attention.block_cache import num_decoder_layers
from outrider.engine.attention.forward_path import RepackedPath
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
from outrider.engine.files.weight_headers import bounded_build, check_counts, read_headers
from outrider.engine.loading.attention_choice import choose_path
from outrider.engine.loading.cache_size import size_cache
from outrider.engine.loading.embedding_files import append_embeddings
from outrider.engine.loading.network_weights import load_weights
from outrider.engine.loading.weight_source import WeightSource
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.parallel.checks import check_can_split
from outrider.engine.parallel.group import Group
from outrider.engine.quantization.quantize import check_int8, method_of, num_parameters
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import full_name, local_path
from outrider.wire.peer_text import bound_text
from outrider.wire.settings.config import TargetConfig, WorkerConfig
from outrider.wire.settings.gpu_shares import num_weight_bytes
from outrider.wire.telemetry.log import get_logger
from outrider.wire.telemetry.phases import log_phase

log = get_logger(__name__)


def load_runner(config: WorkerConfig, join: Callable[[torch.device], Group] | None = None) -> ModelRunner:
    """Load the model of `config`, decoder-only or encoder-decoder, test its attention paths and allocate its KV cache.

    join: function that joins this process with the other ranks of a split model, which call `load_runner`, too, and
    returns their group; needed if tensor_parallel > 1. It is called with the device, after all checks that need no
    other rank. Raises a ConfigError that names what cannot be served.
    """
    device = resolve_device(config.device)
    with memory.explain_out_of_memory(config.model, device):
        return _load(config, device, join)


def _load(config: WorkerConfig, device: torch.device, join: Callable[[torch.device], Group] | None) -> ModelRunner:
    path = local_path(config.model)
    if path is not None and path.is_dir():
        check_folder(path)
    stored_config = read_config(config.model)
    check_class(stored_config)
    limit = context_limit_of(stored_config, config.context_limit)
    generation = read_generation(config.model, stored_config)
    ends = read_ends(config.model, stored_config)
    if ends.difference is not None:
        log.warning("%s", ends.difference)
    source = WeightSource.find(config.model, stored_config, device, config.quantization)
    model_config = source.config
    meta_network = check_weights(config.model, model_config, source)
    limit = limit_to_position_tables(meta_network, limit, config.context_limit)
    source.check_memory(config, meta_network, device)
    check_int8(device, config.quantization)
    quantization = method_of(model_config) or config.quantization
    num_ranks = 1
    if isinstance(config, TargetConfig):
        num_ranks = config.tensor_parallel
    group = None
    if num_ranks > 1:
        method = method_of(stored_config) or quantization
        if source.gguf:
            method = "gguf"
        check_can_split(model_config, num_ranks, method, config.batch_invariant)
        assert join is not None
        group = join(device)
    log_phase(_describe_reading(config.model))
    network = load_weights(source, device, config.dtype, quantization, num_ranks)
    facts = _create_facts(config.model, network, generation, ends.ids, limit, quantization, num_ranks)
    facts = replace(facts, is_text_part=served_class(model_config).is_text_part)
    settle_rope(network, limit)
    if isinstance(config, TargetConfig) and config.lookahead_embeddings is not None:
        facts = replace(facts, num_lookahead=append_embeddings(network, config.lookahead_embeddings))
    num_weight_bytes = memory.weights_bytes(network)
    class_name = type(network).__name__
    supports_features = isinstance(config, TargetConfig)
    runner = choose_path(network, facts, config.attention_path, config.batch_invariant, supports_features)
    del network  # before free memory is counted: a path with weights of its own form does not keep it
    if isinstance(runner.path, RepackedPath):
        num_weight_bytes = runner.path.weights_bytes
    runner.num_weight_bytes = num_weight_bytes
    size_cache(runner, model_config, num_weight_bytes, config, group)
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


def _describe_reading(model: str) -> str:
    path = local_path(model)
    if path is not None and path.is_file():
        num_bytes: int | None = path.stat().st_size
    else:
        num_bytes = num_weight_bytes(model)
    if num_bytes is not None:
        return f"reading weights, {num_bytes / 1e6:,.0f} MB"
    if path is not None:
        return "reading weights"
    return "fetching weights from the hub, and reading them"


def keep_soft_caps(config: PreTrainedConfig) -> None:
    """Select eager attention in the configuration, in place, if the model has soft caps on its attention scores.

    The attention that transformers selects by default may leave the caps out (for Gemma 2, in transformers before
    5.21).
    """
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        config._attn_implementation = "eager"


def resolve_device(device: str) -> torch.device:
    """Return the device that the setting `device` names; for "auto" the first GPU or, if there is none, the CPU.

    Raises ConfigError if this process has no such device.
    """
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
    """Return the transformers configuration of a folder, GGUF file or hub id. For a multimodal model it is the part
    that generates text.

    Raises ConfigError for a configuration that cannot be read or used, and for a folder with an adapter.
    """
    check_no_adapter(model)
    gguf = gguf_path(model)
    raw = read_model_json(model, CONFIG)
    if raw is not None:  # else transformers says what is missing
        check_counts(raw, str(model_file(model, CONFIG)))
    try:
        if gguf is None:
            config = text_generating_part(AutoConfig.from_pretrained(model, trust_remote_code=False))
        else:
            config = read_gguf_config(gguf)
        for name in config.architectures or ():
            if not isinstance(name, str):
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
        served_class(config)  # raises another error for a model that writes no text
        raise ConfigError(
            f"{_architecture(config)} has no one decoder whose layers config.json counts (num_hidden_layers), so what "
            "it keeps of a token is not known; use another model",
            param="model",
        ) from error
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ConfigError(f"{config_name(model)} says {num_layers!r} layers, must be at least 1", param="model")
    return config


def _architecture(config: PreTrainedConfig) -> str:
    names = config.architectures or [type(config).__name__]
    return bound_text(names[0])


def check_weights(model: str, config: PreTrainedConfig, source: WeightSource | None = None) -> PreTrainedModel:
    """Check that a network of this configuration fits the headers of the model's weight files. Return the network on
    the meta device.

    source: where the weights are, and whether they will be unpacked; None = they are loaded as stored. Raises
    ConfigError if the files do not fit the network, and for a model without a KV cache.
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
    if not _has_cache(network):
        raise ConfigError(
            f"{type(network).__name__} keeps no cache of transformers' (past_key_values): each token would compute the "
            "whole text anew; use another model",
            param="model",
        )
    source.check(network, headers)
    return network


def _has_cache(network: PreTrainedModel) -> bool:
    return any("past_key_values" in inspect.signature(module.forward).parameters for module in network.modules())


def check_class(config: PreTrainedConfig) -> None:
    """Raise ConfigError if transformers has no class that generates text for the model, or if it has decoder
    layers of a type that is not served, such as Mamba's.
    """
    name = _architecture(config)
    model_class = network_class(config)
    try:
        types = layer_types(config)
    except Exception as error:  # as in read_config
        raise unusable(config.name_or_path, error) from error
    refusal = memory_refusal(types, is_stateful=getattr(model_class, "_is_stateful", False))
    if refusal is not None:
        raise ConfigError(f"{name} {refusal}", param="model")


def network_class(config: PreTrainedConfig) -> Any:
    """Return the transformers class of the network. Raises ConfigError if there is none that generates text."""
    return served_class(config).model_class


def _create_facts(
    model: str,
    network: PreTrainedModel,
    generation: GenerationConfig,
    end_ids: tuple[int, ...],
    context_limit: int,
    quantization: str,
    num_ranks: int,
) -> ModelFacts:
    head = network.get_output_embeddings()
    if head is None:
        vocab_size = network.config.get_text_config(decoder=True).vocab_size
    else:
        vocab_size = head.weight.shape[0]
    return ModelFacts(
        model_id=full_name(model),
        vocab_size=vocab_size,
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
