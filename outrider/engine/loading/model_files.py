"""Check what a model folder holds before torch reads anything, and read its tokenizer. Used by the workers."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.model_id import INDEX, local_folder

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER_JSON, "tokenizer_config.json", "chat_template.jinja")
"""What a model folder says of its tokens; only the first must be there."""


def check_folder(folder: Path) -> None:
    """Raise ConfigError naming the first file that a model folder lacks."""
    _require(folder, "config.json", "the model's configuration")
    _require(folder, TOKENIZER_JSON, "the tokenizer as the tokenizers library writes it")
    index = folder / INDEX
    if not index.is_file():
        _require(folder, "model.safetensors", "the weights; other formats are not loaded")
        return
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index} is not an index of weights; save the model again", param="model") from None
    for shard in shards:
        _require(folder, shard, "a part of the weights that the index names")


def _require(folder: Path, name: str, what: str) -> None:
    if not (folder / name).is_file():
        raise ConfigError(f"{folder} has no {name} ({what})", param="model")


def tokenizer_files(model: str) -> pb.TokenizerFiles:
    """Read the tokenizer of a folder or hub id; optional files are empty when missing. Raises ConfigError when there is
    no tokenizer.json.
    """
    paths = [model_file(model, name) for name in TOKENIZER_FILES]
    if paths[0] is None:
        raise ConfigError(f"{model} has no {TOKENIZER_JSON} (the tokenizer as the tokenizers library writes it)")
    found = [b"" if path is None else path.read_bytes() for path in paths]
    return pb.TokenizerFiles(tokenizer_json=found[0], tokenizer_config_json=found[1], chat_template=found[2])


def model_file(model: str, name: str) -> Path | None:
    """Return a file of a folder or, as a local copy, of a hub id; None where there is none. Raises ConfigError."""
    folder = local_folder(model)
    if folder is None:
        return _hub_file(model, name)
    return folder / name if (folder / name).is_file() else None


def _hub_file(model: str, name: str) -> Path | None:
    """Return the file's local copy, or None when the repository has no such file."""
    from huggingface_hub import hf_hub_download  # here, since a local folder needs no network library
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError:  # also when it is not in the local cache and the hub is out of reach
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {name} of {model}: {first_line(error)}", param="model") from None


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
