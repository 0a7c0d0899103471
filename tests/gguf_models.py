"""Write a tiny Llama as a GGUF file with the `gguf` package, as llama.cpp's converter would."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaForCausalLM

from tests.tiny_models import EOS_ID, UNKNOWN_ID

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}</s>"
CONTROL, NORMAL = 3, 1
"""Kinds of tokens, as GGUF counts."""


def write_gguf(
    folder: str,
    path: Path,
    type_of_matrices: Type = Type.Q8_0,
    architecture: str = "llama",
    values: dict[str, Any] | None = None,
    tensors: dict[str, numpy.ndarray] | None = None,
    cut: str = "gpt-2",
    template: str | int = TEMPLATE,
) -> str:
    """Write the model of a folder of `tiny_llama`; return the file's path.

    values: more of what the file states, by names after the architecture. tensors: more tensors. cut: how the tokenizer
    cuts a text. template: of chats; a number is none.
    """
    network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, writer = network.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for name, value in (values or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{name}", value)
    _add_tokenizer(writer, Path(folder), cut)
    kind_of_template = gguf.GGUFValueType.STRING if isinstance(template, str) else gguf.GGUFValueType.UINT32
    writer.add_key_value("tokenizer.chat_template", template, kind_of_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in network.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        numbers = tensor.numpy()
        num_heads = heads.get(stem.rsplit(".", 1)[-1])
        if num_heads is not None:  # pairs of a rotation lie side by side
            numbers = numbers.reshape(num_heads, 2, -1, numbers.shape[1]).swapaxes(1, 2).reshape(numbers.shape)
        kind = type_of_matrices if numbers.ndim == 2 else Type.F32
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", gguf.quantize(numbers, kind), raw_dtype=kind)
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, cut: str) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].__getitem__)
    special = {token["content"] for token in stored["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in stored["model"]["merges"]])
    writer.add_bos_token_id(EOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_unk_token_id(UNKNOWN_ID)
    writer.add_eot_token_id(UNKNOWN_ID)
