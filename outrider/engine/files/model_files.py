"""Find the files of a model and check them before torch reads anything. Used by the workers.

A folder may come from anybody: a file of it lies in it, also where it is a link, and is of a bounded size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import GGUF_SUFFIX, INDEX, SAFE, is_gguf, local_path, split_hub_id
from outrider.wire.models.model_json import parse_object, parse_weight_map
from outrider.wire.models.tokenizer_json import TOKENIZER_JSON
from outrider.wire.peer_text import bound_text

CONFIG = "config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
TEKKEN = "tekken.json"
TOKENIZER_SOURCES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", TEKKEN, "vocab.json")
"""Other forms of a tokenizer, of which transformers makes a tokenizer.json."""
MAX_BYTES = {CONFIG: 1 << 20, GENERATION: 1 << 20, INDEX: 24 << 20, TOKENIZER_JSON: 40 << 20, TEKKEN: 40 << 20}
"""Bytes of files that are read whole. Gemma 3's tokenizer.json has 32 MiB, Mistral Small 3's tekken.json 19, DeepSeek
V3's index 9. Of a configuration transformers makes several copies, which takes seconds at 1 MiB.
"""
MAX_OTHER_BYTES = 8 << 20
"""Bytes of other such files. Orpheus 3B's tokenizer_config.json has 5 MiB."""

MAX_QUOTED = 400
"""Bytes of another library's error in one of ours: it may quote as much of a file as it likes."""


def check_folder(folder: Path) -> None:
    """Raise ConfigError naming the first file that a model folder lacks, or an index of anything but safetensors."""
    check_no_adapter(str(folder))
    if _file_in(folder, CONFIG) is None:
        _refuse_gguf_folder(str(folder), sorted(path.name for path in folder.glob(f"*{GGUF_SUFFIX}")), "/")
    _require(folder, CONFIG, "the model's configuration")
    if all(_file_in(folder, name) is None for name in TOKENIZER_SOURCES):
        _require(folder, TOKENIZER_JSON, "the tokenizer as the tokenizers library writes it")
    if weight_map(str(folder)) is None:
        _require(folder, SAFE[0], "the weights; other formats are not loaded")


def check_no_adapter(model: str) -> None:
    """Raise ConfigError for a folder or hub id with an adapter, alone or beside weights: it would not be applied."""
    adapter = read_model_json(model, ADAPTER)
    if adapter is None:
        return
    base = bound_text(repr(adapter.get("base_model_name_or_path")))
    raise ConfigError(
        f"{model} has an adapter ({ADAPTER}, base model {base}), and adapters are not applied; merge it into its base "
        f"(peft: merge_and_unload, save_pretrained) and give that folder, or delete {ADAPTER} where the weights beside "
        "it are whole",
        param="model",
    )


def _require(folder: Path, name: str, what: str) -> None:
    if _file_in(folder, name) is None:
        raise ConfigError(f"{folder} has no {name} ({what})", param="model")


def _refuse_gguf_folder(model: str, files: list[str], joint: str) -> None:
    """Raise ConfigError, naming a file, where what should be a model's folder holds GGUF files. joint: before it."""
    if files:
        others = f"; of {len(files)} such files name one" if len(files) > 1 else ""
        raise ConfigError(
            f"{model} has no {CONFIG} and holds GGUF: name the file, {model}{joint}{files[0]}{others}", param="model"
        )


def weight_map(model: str) -> dict[str, Path] | None:
    """Return the safetensors file of each tensor that the index of a folder or hub id names; None without an index.

    Raises ConfigError for an index that names anything else, before any of it is opened.
    """
    index = model_file(model, INDEX)
    if index is None:
        return None
    shards = parse_weight_map(read_file(index), str(index))
    paths = {}
    for shard in sorted(set(shards.values())):
        path = model_file(model, shard)
        if path is None:
            whole = "" if model_file(model, SAFE[0]) is None else f"; where {SAFE[0]} has all weights, delete {INDEX}"
            raise ConfigError(
                f"{model} has no {shard} (a part of the weights that the index names){whole}", param="model"
            )
        paths[shard] = path
    if SAFE[0] not in paths and model_file(model, SAFE[0]) is not None:  # transformers would read that one instead
        raise ConfigError(
            f"{model} has {SAFE[0]} and an {INDEX} that does not name it; delete the one that is not meant",
            param="model",
        )
    return {tensor: paths[shard] for tensor, shard in shards.items()}


def config_name(model: str) -> str:
    """Return what an error calls the file that describes the network."""
    return f"the header of {model}" if is_gguf(model) else f"the {CONFIG} of {model}"


def read_model_json(model: str, name: str) -> dict[str, Any] | None:
    """Return the object in a file of a folder or hub id; None where there is no such file. Raises ConfigError."""
    path = model_file(model, name)
    return None if path is None else parse_object(read_file(path), str(path))


def model_file(model: str, name: str) -> Path | None:
    """Return a file of a folder or, as a local copy, of a hub id; None where there is none, and for GGUF, which holds
    all in one. Raises ConfigError, also for a link that leads out of the folder.
    """
    if is_gguf(model):
        return None
    folder = local_path(model)
    return _hub_file(model, name) if folder is None else _file_in(folder, name)


def gguf_path(model: str) -> Path | None:
    """Return the GGUF file that the setting names, of a hub its local copy; None for others. Raises ConfigError."""
    if not is_gguf(model):
        return None
    path = local_path(model)
    if path is None:
        repository, name = split_hub_id(model)
        assert name is not None  # else it would be here
        path = _hub_file(repository, name)
    if path is None:
        raise ConfigError(
            f"there is no {name} in {repository}, or the hub was not reached; fetch it where there is a network: "
            f"outrider pull {model}",
            param="model",
        )
    return path


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


def read_file(path: Path) -> bytes:
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


def unusable(model: str, error: Exception, name: str = CONFIG) -> ConfigError:
    """Return what to say of a configuration that transformers raised an error for. name: of its file."""
    shown = config_name(model) if name == CONFIG else f"the {name} of {model}"
    why = bound_text(f"{type(error).__name__}: {' '.join(str(error).split())}", MAX_QUOTED)
    return ConfigError(f"transformers cannot use {shown} ({why}); correct it", param="model")
