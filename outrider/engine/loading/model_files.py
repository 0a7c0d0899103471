"""Find the files of a model folder or hub id and check them before torch reads anything. Used by the workers.

A folder may come from anybody: a file of it lies in it, also where it is a link, and is of a bounded size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.model_id import ADDITIONAL_TEMPLATES, INDEX, SAFE, local_folder
from outrider.wire.model_json import parse_object, parse_weight_map
from outrider.wire.peer_text import bound_text
from outrider.wire.tokenizer_json import TOKENIZER_JSON, load_tokenizer

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (TOKENIZER_JSON, "tokenizer_config.json", "chat_template.jinja")
"""What a model folder says of its tokens; only the first must be there."""
MAX_BYTES = {CONFIG: 1 << 20, GENERATION: 1 << 20, INDEX: 24 << 20, TOKENIZER_JSON: 40 << 20}
"""Bytes of files that are read whole. Gemma 3's tokenizer.json has 32 MiB, DeepSeek V3's index 9. Of a configuration
transformers makes several copies, which takes seconds at 1 MiB.
"""
MAX_OTHER_BYTES = 8 << 20
"""Bytes of other such files. Orpheus 3B's tokenizer_config.json has 5 MiB."""

MAX_QUOTED = 400
"""Bytes of another library's error in one of ours: it may quote as much of a file as it likes."""


def check_folder(folder: Path) -> None:
    """Raise ConfigError naming the first file that a model folder lacks, or an index of anything but safetensors."""
    _require(folder, CONFIG, "the model's configuration")
    _require(folder, TOKENIZER_JSON, "the tokenizer as the tokenizers library writes it")
    if weight_map(str(folder)) is None:
        _require(folder, SAFE[0], "the weights; other formats are not loaded")


def _require(folder: Path, name: str, what: str) -> None:
    if _file_in(folder, name) is None:
        raise ConfigError(f"{folder} has no {name} ({what})", param="model")


def weight_map(model: str) -> dict[str, Path] | None:
    """Return the safetensors file of each tensor that the index of a folder or hub id names; None without an index.

    Raises ConfigError for an index that names anything else, before any of it is opened.
    """
    index = model_file(model, INDEX)
    if index is None:
        return None
    shards = parse_weight_map(_read(index), str(index))
    paths = {}
    for shard in sorted(set(shards.values())):
        path = model_file(model, shard)
        if path is None:
            raise ConfigError(f"{model} has no {shard} (a part of the weights that the index names)", param="model")
        paths[shard] = path
    if SAFE[0] not in paths and model_file(model, SAFE[0]) is not None:  # transformers would read that one instead
        raise ConfigError(
            f"{model} has {SAFE[0]} and an {INDEX} that does not name it; delete the one that is not meant",
            param="model",
        )
    return {tensor: paths[shard] for tensor, shard in shards.items()}


def tokenizer_files(model: str) -> pb.TokenizerFiles:
    """Read the tokenizer of a folder or hub id; optional files are empty when missing. Raises ConfigError when there is
    no tokenizer.json, or none that encodes text.
    """
    paths = [model_file(model, name) for name in TOKENIZER_FILES]
    if paths[0] is None:
        raise ConfigError(f"{model} has no {TOKENIZER_JSON} (the tokenizer as the tokenizers library writes it)")
    found = [b"" if path is None else _read(path) for path in paths]
    load_tokenizer(found[0], str(paths[0]))
    if found[1]:
        parse_object(found[1], str(paths[1]))
    templates = {name: model_file(model, file) for name, file in ADDITIONAL_TEMPLATES.items()}
    return pb.TokenizerFiles(
        tokenizer_json=found[0],
        tokenizer_config_json=found[1],
        chat_template=found[2],
        additional_chat_templates={name: _read(path) for name, path in templates.items() if path is not None},
    )


def read_model_json(model: str, name: str) -> dict[str, Any] | None:
    """Return the object in a file of a folder or hub id; None where there is no such file. Raises ConfigError."""
    path = model_file(model, name)
    return None if path is None else parse_object(_read(path), str(path))


def model_file(model: str, name: str) -> Path | None:
    """Return a file of a folder or, as a local copy, of a hub id; None where there is none. Raises ConfigError, also
    for a link that leads out of the folder.
    """
    folder = local_folder(model)
    return _hub_file(model, name) if folder is None else _file_in(folder, name)


def _file_in(folder: Path, name: str) -> Path | None:
    path = folder / name
    if not path.is_file():
        return None
    _check_inside(path, folder)
    return path


def _check_inside(path: Path, folder: Path) -> None:
    """Raise ConfigError for a link that leads out of the model's folder; a snapshot in a hub's cache has its contents
    in the same repository's blobs.
    """
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        folder = folder.parents[1]
    if not path.resolve().is_relative_to(folder):
        raise ConfigError(
            f"{path} is a link that leads out of its folder, to {path.resolve()}; copy the file there if it is meant",
            param="model",
        )


def _read(path: Path) -> bytes:
    """Return the content of a file that is read whole. Raises ConfigError for one that is too large."""
    limit = MAX_BYTES.get(path.name, MAX_OTHER_BYTES)
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="model") from None
    if len(data) > limit:
        raise ConfigError(f"{path} has more than {limit >> 20} MiB, which is too much to be one", param="model")
    return data


def _hub_file(model: str, name: str) -> Path | None:
    """Return the file's local copy, or None when the repository has no such file, nor the hub's cache while the hub is
    out of reach. Raises ConfigError when nothing of the repository was fetched before, which its config.json shows.
    """
    from huggingface_hub import hf_hub_download  # here, since a local folder needs no network library
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        path = Path(hf_hub_download(model, name))
    except EntryNotFoundError as error:
        if name == CONFIG and isinstance(error, LocalEntryNotFoundError):
            raise ConfigError(
                f"{model} is no folder here, the hub's cache has no {CONFIG} of it, and the hub was not reached; "
                f"correct the folder's path, or fetch the model where there is a network: outrider pull {model}",
                param="model",
            ) from None
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {name} of {model}: {first_line(error)}", param="model") from None
    _check_inside(path, path.parents[name.count("/")])
    return path


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, cut where it quotes too much of a file."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return bound_text(line, MAX_QUOTED)
