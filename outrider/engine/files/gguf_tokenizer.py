"""Make a model folder's tokenizer files of what a GGUF file holds of them, through transformers. Used by the workers.

The gateway reads a tokenizer.json, without transformers.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.engine.files.gguf_files import check_installed
from outrider.engine.files.model_files import first_line
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.models.gguf_header import read_header
from outrider.wire.models.tokenizer_json import load_tokenizer
from outrider.wire.peer_text import bound_text
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

BYTE_LEVEL = "gpt2"
"""`tokenizer.ggml.model` of a tokenizer that joins bytes: `tokenizer.ggml.pre` names how it cuts a text before."""
AS_GPT2 = frozenset(
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "a.x-4.0", "mellum", "exaone4", "granite-docling")
)
"""Cuts that are GPT-2's."""
EACH_DIGIT = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"))
"""Cuts that are GPT-2's with each digit apart."""
WHOLE_WORDS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
)
"""Tokenizers that take a word that is a token as it is, without joining, and begin a text unless the file says not."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def gguf_tokenizer_files(path: Path) -> pb.TokenizerFiles:
    """Return the tokenizer and chat template of a file. Raises ConfigError."""
    read_header(path)
    check_installed(path)
    return _files_of(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _files_of(path: Path, _changed_ns: int) -> pb.TokenizerFiles:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    try:
        architecture, vocabulary, stated = get_gguf_tokenizer(str(path))
        backend, others = convert_gguf_tokenizer(architecture, vocabulary)
        if vocabulary.get("tokenizer_type") == BYTE_LEVEL:
            _cut_as_learned(path, backend, vocabulary.get("pre_tokenizer_type"), stated)
        whole = PreTrainedTokenizerFast(tokenizer_object=backend, **stated, **others)
        tokenizer_json = _without_others(whole.backend_tokenizer, len(vocabulary["tokens"]))
    except ConfigError:
        raise
    except Exception as error:  # transformers computes with what the file states, and raises whatever comes of that
        raise ConfigError(
            f"transformers {transformers.__version__} makes no tokenizer of {path}: {first_line(error)}; use the "
            "model's folder of safetensors",
            param="model",
        ) from None
    load_tokenizer(tokenizer_json, f"the tokenizer of {path}")
    config = {name: stated[name] for name in SPECIAL if stated.get(name) is not None}
    template = stated.get("chat_template") or ""
    if not isinstance(template, str):
        shown = bound_text(repr(template))
        raise ConfigError(
            f"the chat template of {path} is {shown}, which is no text; get the file again", param="model"
        )
    return pb.TokenizerFiles(
        tokenizer_json=tokenizer_json,
        tokenizer_config_json=json.dumps(config).encode(),
        chat_template=template.encode(),
    )


def _without_others(tokenizer: Tokenizer, num_tokens: int) -> bytes:
    """Return tokenizer.json without special tokens that transformers' classes add and the file has not."""
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < num_tokens]
    return json.dumps(data, ensure_ascii=False).encode()


def _cut_as_learned(path: Path, backend: Tokenizer, cut: str | None, stated: dict[str, Any]) -> None:
    """Complete what transformers makes of a byte-level tokenizer. Raises ConfigError for a cut that nobody knows.

    cut: its name in the file. stated: what tokenizer_config.json has, changed here.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if cut is None or cut == "default":
        log.warning("%s does not say how its tokenizer cuts a text; it is cut as GPT-2 does", path)
        return
    if cut in EACH_DIGIT:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    elif cut not in AS_GPT2 and cut not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ConfigError(
            f"the tokenizer of {path} cuts a text by {bound_text(cut)!r}, which is not known here, and another cut "
            "would give the model other tokens than it learned; use the model's folder of safetensors",
            param="model",
        )
    if cut in WHOLE_WORDS:
        backend.model.ignore_merges = True
        stated.setdefault("add_bos_token", True)
