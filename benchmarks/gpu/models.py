"""Models that the kit makes on the card: a random Llama, and the demo pair widened to sizes that people serve."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.bench import DEMO_TARGET
from outrider.lab.models.widening import WidenedSizes, largest_difference, widen

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
SAVE_THREADS = 8
"""Threads that copy tensors to a file in memory: one alone is bound by page faults."""
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""As safetensors writes them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int
    context: int


LLAMA_8B = Shape(4096, 14336, 32, 32, 8, 128_256, 128, 131_072)
LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 128_256, 64, 131_072)
TINY = Shape(64, 128, 2, 4, 2, 1000, 16, 1024)
"""Of a rehearsal."""
WIDE_TARGET = WidenedSizes(hidden=4096, intermediate=14336, heads=64, kv_heads=8, extra_layers=26)
"""Of the demo target, to 32 layers: 8.0 thousand million parameters with WIDE_VOCAB. Its heads stay 64 wide, so that
twice as many make an 8B Llama's query projection; its KV heads are half as wide as that model's."""
WIDE_DRAFT = WidenedSizes(hidden=2048, intermediate=8192, heads=32, kv_heads=8, extra_layers=14)
"""Of the demo draft, to 16 layers: 1.2 thousand million parameters."""
WIDE_VOCAB = 128_256
"""Rows of logits, as Llama 3 has. The demo pair's tokenizer has 4,096; nobody says the others."""


def random_llama(shape: Shape, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a Llama with random weights, made on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        architectures=["LlamaForCausalLM"],
    )

    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return model.eval().requires_grad_(False)


def save(model: LlamaForCausalLM, folder: Path, tokenizer: Path = DEMO_TARGET) -> None:
    """Write a model's folder: config.json, one file of weights, and the demo pair's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    write_safetensors(tensors, folder / "model.safetensors")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder / name)


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors from their device into a file that is mapped, by several threads and without a copy between.

    The library's own writer takes all of it through host memory first, by one thread: half a minute for 16 GB.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 64)  # so that tensors are aligned
    head = struct.pack("<Q", len(encoded)) + encoded
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(len(head) + end)
    mapped = torch.from_file(str(path), shared=True, size=len(head) + end, dtype=torch.uint8)

    def copy(name: str) -> None:
        start, stop = header[name]["data_offsets"]
        flat = tensors[name].contiguous().view(-1).view(torch.uint8)
        mapped[len(head) + start : len(head) + stop].copy_(flat)

    with ThreadPoolExecutor(SAVE_THREADS) as threads:
        list(threads.map(copy, tensors))


def widened(
    source: Path, sizes: WidenedSizes, vocab: int, device: str, dtype: torch.dtype
) -> tuple[LlamaForCausalLM, float]:
    """Return the model in `source` at those sizes on the device, in `dtype`, and how far its logits are from the
    model's own: the same text at a larger model's cost.
    """
    model = LlamaForCausalLM.from_pretrained(source, dtype=dtype, use_safetensors=True).eval().to(device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # or it would be made in float32 first, 32 GB of it
    try:
        with torch.device(device):
            wide = widen(model, sizes)
    finally:
        torch.set_default_dtype(before)
    difference = largest_difference(model, wide)
    return widen_vocabulary(wide, vocab), difference


def widen_vocabulary(model: LlamaForCausalLM, vocab: int) -> LlamaForCausalLM:
    """Add rows to the embedding and the output matrix, in place, that are never said.

    Each new output row is the one of the least likely token, which the model gave next to no probability wherever it
    was looked at, times a factor that makes it less likely still. Its cost is that of a row of logits.
    The embedding begins again: of rows of zeros the self-test, which feeds ids of the whole vocabulary, would get
    logits that are all zero.
    """
    config = model.config
    if vocab <= config.vocab_size:
        return model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight  # [V, D]
    row = unlikely_row(model)
    num_new = vocab - config.vocab_size
    new_head = torch.cat([head, row.expand(num_new, -1)])
    again = torch.arange(num_new, device=embedding.device) % len(embedding)
    new_embedding = torch.cat([embedding, embedding[again]])
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(new_embedding, freeze=True))
    model.lm_head = torch.nn.Linear(new_head.shape[1], vocab, bias=False, device="meta")
    model.lm_head.weight = torch.nn.Parameter(new_head, requires_grad=False)
    config.vocab_size, config.tie_word_embeddings = vocab, False
    return model.eval().requires_grad_(False)


CONTEXTS = (16, 64)
"""Random sequences and their length, after which the least likely token is looked for."""
LEAST_LIKELY = -18.0
"""Log-probability, in nats, that a new row may have at most: 124,160 of them then have less than 2e-3 together."""
MAX_FACTOR = 64


@torch.inference_mode()
def unlikely_row(model: LlamaForCausalLM) -> Tensor:
    """Return an output row [1, D] whose token is unlikely after whatever was tried."""
    config = model.config
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, CONTEXTS, generator=generator).to(model.device)
    logits = model(ids).logits.flatten(0, 1).float()  # [N, V]
    total = logits.logsumexp(dim=1, keepdim=True)
    highest = (logits - total).amax(dim=0)  # [V], over contexts
    token = int(highest.argmin())
    row = model.get_output_embeddings().weight[token : token + 1]
    factor = 1
    while factor < MAX_FACTOR and float((factor * logits[:, token] - total[:, 0]).max()) > LEAST_LIKELY:
        factor *= 2
    return row * factor
