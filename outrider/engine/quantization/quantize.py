"""Round weights to 8 bits at load (`quantization=int8`), and check that quantised checkpoints can be read.

Int8 applies to weights only: activations keep the model's dtype. It is symmetric, with one scale for each output
channel, so that a product of the integers is scaled once, at its end. Embeddings are not rounded. The lm_head is: on
the demo target the largest error of a logit is 4.3 % of the largest logit (4.2 % if the lm_head is not rounded), and
the most likely token is the same as without any rounding at 98.8 % of positions either way.

Transformers reads quantised checkpoints by a quantizer for each method, which states the package and the device that it
needs. If one is missing, `unpack` reads the common methods. Called by the loader.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

from outrider.engine import memory
from outrider.engine.files.model_files import first_line
from outrider.engine.memory import readable_bytes
from outrider.engine.quantization.packed_linear import int8_product
from outrider.engine.quantization.unpack import METHODS
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import WorkerConfig
from outrider.wire.telemetry.log import get_logger

GPU_ALONE = ("compressed-tensors",)
"""Methods of quantisation (`quant_method`) whose own library is used only on a GPU. On other devices that library would
unpack each weight at its first use and keep it unpacked; so all weights are unpacked at load instead."""

log = get_logger(__name__)


def quantization_of(config: PreTrainedConfig) -> Any:
    """Return the `quantization_config` of a model or of its text part, as a dict or transformers' object; None if the
    weights are not quantised.
    """
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return found
    return None


def method_of(config: PreTrainedConfig) -> str | None:
    """Return the checkpoint's method of quantisation as its config.json names it (gptq, awq, torchao, ..); None if its
    weights are not quantised.
    """
    found = quantization_of(config)
    if found is None:
        return None
    if isinstance(found, dict):
        name = found.get("quant_method")
    else:
        name = found.quant_method
    return str(getattr(name, "value", name))


def unpack_reason(model: str, config: PreTrainedConfig, device: torch.device, setting: str) -> str | None:
    """Return the reason why a checkpoint's weights must be unpacked at load: which kernels or package are missing to
    run them quantised. None if the weights are not quantised, or can run as they are stored.

    setting: the setting `quantization`. Raises ConfigError if the weights can be neither run nor unpacked here, and if
    `setting` asks to quantise weights that are quantised already.
    """
    method = method_of(config)
    if method is None:
        return None
    if setting != "none":
        raise ConfigError(
            f"quantization is {setting!r} and the weights of {model} are quantised by {method} already; "
            "use quantization none",
            param="quantization",
        )
    missing = _missing_to_run(config, method, device)
    if missing is None:
        return None
    if method not in METHODS:
        raise ConfigError(
            f"the weights of {model} are quantised by {method}, which cannot be read on {device}: {missing}; "
            "install what is missing, or use a checkpoint that is not quantised",
            param="model",
        )
    return f"they are quantised by {method}: {missing}"


def check_unpacked(
    settings: WorkerConfig, why: str, network: PreTrainedModel, dtype: torch.dtype | str, device: torch.device
) -> None:
    """Log how much memory the unpacked weights take. Raises ConfigError if less is free, or if the setting
    `unpack_weights` is false.

    why: the reason for unpacking, from `unpack_reason`. network: the model on the meta device. dtype: the dtype to
    which the weights are unpacked.
    """
    model = settings.model
    if not settings.unpack_weights:
        raise ConfigError(
            f"unpack_weights is false, and the weights of {model} can only run unpacked on {device}: {why}; set it "
            "true, or install what is missing",
            param="unpack_weights",
        )
    assert isinstance(dtype, torch.dtype)
    num_bytes = sum(parameter.numel() for parameter in network.parameters()) * dtype.itemsize
    free = memory.free_memory_bytes(device)
    name = str(dtype).removeprefix("torch.")
    if num_bytes > free:
        remedy = ""
        if dtype is torch.float32:
            remedy = "set dtype bfloat16, "
        raise ConfigError(
            f"the weights of {model} take {readable_bytes(num_bytes)} when unpacked to {name} ({why}), and "
            f"{readable_bytes(free)} are free on {device}; {remedy}use a smaller model, another device, or free some",
            param="dtype",
        )
    log.info("the weights of %s are unpacked to %s, %s: %s", model, name, readable_bytes(num_bytes), why)


def _missing_to_run(config: PreTrainedConfig, method: str, device: torch.device) -> str | None:
    # What is missing to run the packed weights on the device, in words.
    if method not in AUTO_QUANTIZER_MAPPING and method in METHODS:
        return f"transformers {transformers.__version__} has no reader for it"
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # it would warn of what is refused or logged below in one line
    try:
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(quantization_of(config)), pre_quantized=True)
        quantizer.validate_environment(device_map={"": device})
    except Exception as error:  # each method has errors of its own
        return first_line(error)
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    would_unpack = getattr(quantizer.quantization_config, "dequantize", False)
    if would_unpack or (method in GPU_ALONE and device.type != "cuda"):
        return f"{device} has no kernels for it"
    return None


def unpacked_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the configuration without `quantization_config`, for a network of unquantised weights."""
    whole = copy.deepcopy(config)
    for part in (whole, whole.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return whole


def check_int8(device: torch.device, setting: str) -> None:
    """Raise ConfigError if the setting `quantization` is int8 and the device is a GPU.

    On a GPU `Int8Linear` unpacks a whole weight for each product: it reads 8 bits, writes 16 and reads 16, which is two
    and a half times the traffic of bfloat16.
    """
    if setting == "int8" and device.type == "cuda":
        raise ConfigError(
            f"quantization is 'int8' and the device {device}: rounded at load, weights are faster on a CPU alone, and "
            "slower than bfloat16 on a GPU; leave quantization out, or name a checkpoint that is quantised for GPUs "
            "(FP8, AWQ, GPTQ, torchao)",
            param="quantization",
        )


NARROW = 4
"""Maximum number of tokens for which torch's kernel for bfloat16 x int8 is used. For few tokens it is faster than
unpacking the weights. Measured on a CPU at 1024 x 2816, kernel against unpacking: 1 token 0.15 against 0.62 ms, 6
tokens 0.50 against 0.92, 32 tokens 2.4 against 1.4."""


class Int8Linear(nn.Module):
    """Linear layer with int8 weights. It is no subclass of `nn.Linear`, so that code for linear layers does not pack
    its weights or take them for weights in the model's dtype.
    """

    def __init__(self, weight_int8: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """weight_int8: [outputs, inputs] int8. scale: [outputs]. bias: [outputs]. Scale and bias have the dtype
        of the activations.
        """
        super().__init__()
        self.is_copy = False
        """Whether this layer is a tied lm_head. Its int8 weights were rounded from the embedding, which keeps its own
        weights."""
        self.out_features, self.in_features = weight_int8.shape
        self.weight = nn.Parameter(weight_int8.contiguous(), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product [..., outputs] of x [..., inputs] with the weight, plus the bias, in the dtype of x."""
        flat = x.reshape(-1, self.in_features)  # [M, K]
        product = None
        if flat.shape[0] <= NARROW and x.dtype is torch.bfloat16:
            product = int8_product(*self.weight.shape)
        if product is not None:
            out = product(flat.contiguous(), self.weight, self.scale)  # [M, N]
        else:
            out = (flat @ self.weight.to(x.dtype).t()) * self.scale  # [M, N]
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)


def quantize_int8(network: PreTrainedModel) -> None:
    """Replace every linear layer by an `Int8Linear`, in place, on the device of its weights.

    Raises ConfigError for a model without linear layers.
    """
    num_bytes = _num_bytes(network)
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in network.modules():
        for name, child in parent.named_children():
            if type(child) in (nn.Linear, Conv1D):  # a subclass, such as Llama 4's router, computes something else
                found.append((parent, name, child))
    if not found:
        raise ConfigError(
            f"{type(network).__name__} has no linear layers that int8 is made for; use quantization none",
            param="quantization",
        )
    embedding = network.get_input_embeddings()
    for parent, name, child in found:
        weight = child.weight  # [N, K]
        if isinstance(child, Conv1D):
            weight = weight.t()
        rounded = Int8Linear(*_round(weight.detach()), child.bias)
        rounded.is_copy = child.weight is embedding.weight
        setattr(parent, name, rounded)
    log.info(
        "%d linear layers rounded to int8: %d bytes of weights, were %d", len(found), _num_bytes(network), num_bytes
    )


def num_parameters(network: PreTrainedModel) -> int:
    """Return the number of weights of the network. Tied weights are counted once, also if the lm_head was rounded to
    int8 and the embedding was not.
    """
    count = sum(parameter.numel() for parameter in network.parameters())
    head = network.get_output_embeddings()
    if isinstance(head, Int8Linear) and head.is_copy:
        count -= head.weight.numel()
    return count


def _round(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [N, K] as ([N, K] int8 without -128, scale [N] of its dtype), bit for bit as torchao rounds.

    A channel [0.5, -1.0] has the scale 1 / 127.5, and becomes [64, -127].
    """
    smallest = torch.finfo(torch.float32).eps  # a channel of zeros has a scale, too
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127.5).clamp(min=smallest)  # [N, 1]
    steps = (weight * (1 / scale.float())).round().clamp(-127, 127)  # [N, K], the same range on both sides of 0
    return steps.to(torch.int8), scale[:, 0]


def _num_bytes(network: PreTrainedModel) -> int:
    tensors = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
