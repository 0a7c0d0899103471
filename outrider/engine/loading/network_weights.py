"""Read a model's weights into its network, by transformers. Called by the loader, after all checks."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import is_accelerate_available

from outrider.engine.architectures.positions import number_every_token
from outrider.engine.architectures.text_part import attention_of_text, plain_form, served_class
from outrider.engine.files.model_files import first_line
from outrider.engine.files.tied_tables import check_tied_weights
from outrider.engine.loading.weight_source import WeightSource
from outrider.engine.quantization.quantize import method_of, quantize_int8
from outrider.wire.errors import ConfigError


def load_weights(
    source: WeightSource, device: torch.device, dtype: str, quantization: str, num_ranks: int
) -> PreTrainedModel:
    """Return the network with its weights on the device, in eval mode, without gradients.

    source: where the weights are, and whether they are unpacked. dtype: the setting of this name. quantization: "int8"
    = the linear layers are quantised after reading; "none" = they are not. num_ranks: number of ranks over which
    transformers splits the weights; this process reads its own part only. Raises ConfigError for files that are
    damaged, that lack tensors of the network, or whose tensors have other shapes.
    """
    model = source.model
    config = source.config
    model_class = served_class(config).model_class
    attention = "eager"
    if getattr(model_class, "_supports_sdpa", False):
        attention = "sdpa"
    # Else transformers raises an error that names no tensor.
    options: dict[str, Any] = {"trust_remote_code": False, "ignore_mismatched_sizes": True}
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
    for name, stored_shape, shape in sorted(info["mismatched_keys"]):
        raise ConfigError(
            f"{name} of {model} is {list(stored_shape)}, and by its config.json must be {list(shape)}; correct it or "
            "get the files again",
            param="model",
        )
    missing = sorted(info["missing_keys"])
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
    if is_quantised:
        return network
    return network.to(device)  # copies nothing that is there already
