"""Convert the tokenizer in a GGUF file to the files of a model folder, through transformers.

Used by the workers, since the gateway reads a tokenizer.json, without transformers.
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
"""Value of `tokenizer.ggml.model` for a byte-level BPE. `tokenizer.ggml.pre` then names its pre-tokenizer."""
AS_GPT2 = frozenset(
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "a.x-4.0", "mellum", "exaone4", "granite-docling")
)
"""Names in `tokenizer.ggml.pre` of pre-tokenizers that split text as GPT-2's pre-tokenizer does."""
EACH_DIGIT = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"))
"""Names in `tokenizer.ggml.pre` of pre-tokenizers that split numbers into digits and then split text as GPT-2's
does."""
WHOLE_WORDS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
)
"""Names in `tokenizer.ggml.pre` of pre-tokenizers for a BPE that applies no merges to a word that is itself a token
(`ignore_merges`). Their texts begin with `bos_token` unless the file states otherwise."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Names of the special tokens in the tokenizer_config.json that is made from a GGUF file."""


def gguf_tokenizer_files(path: Path) -> pb.TokenizerFiles:
    """Return the tokenizer and chat template of a GGUF file, as the files of a model folder.

    Raises ConfigError for a file that is damaged, or whose tokenizer transformers cannot convert.
    """
    read_header(path)
    check_installed(path)
    return _convert(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _convert(path: Path, _changed_ns: int) -> pb.TokenizerFiles:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    try:
        architecture, vocabulary, stated = get_gguf_tokenizer(str(path))
        backend, others = convert_gguf_tokenizer(architecture, vocabulary)
        if vocabulary.get("tokenizer_type") == BYTE_LEVEL:
            _set_pre_tokenizer(path, backend, vocabulary.get("pre_tokenizer_type"), stated)
        complete = PreTrainedTokenizerFast(tokenizer_object=backend, **stated, **others)
        tokenizer_json = _serialize(complete.backend_tokenizer, len(vocabulary["tokens"]))
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


def _serialize(tokenizer: Tokenizer, num_tokens: int) -> bytes:
    # special tokens that transformers' classes add and the file has not are left out
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < num_tokens]
    return json.dumps(data, ensure_ascii=False).encode()


def _set_pre_tokenizer(path: Path, backend: Tokenizer, name: str | None, stated: dict[str, Any]) -> None:
    """Complete a byte-level tokenizer of transformers and its tokenizer_config.json (`stated`), in place.

    Raises ConfigError for a pre-tokenizer whose `name` is not known.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if name is None or name == "default":
        log.warning("%s does not say how its tokenizer cuts a text; it is cut as GPT-2 does", path)
        return
    if name in EACH_DIGIT:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif name not in AS_GPT2 and name not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ConfigError(
            f"the tokenizer of {path} cuts a text by {bound_text(name)!r}, which is not known here, and another cut "
            "would give the model other tokens than it learned; use the model's folder of safetensors",
            param="model",
        )
    if name in WHOLE_WORDS:
        backend.model.ignore_merges = True
        stated.setdefault("add_bos_token", True)
