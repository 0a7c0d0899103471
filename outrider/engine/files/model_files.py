"""Find the files of a model and check them before torch reads anything. Used by the workers.

A folder may come from anyone, so its files must lie inside it, also if they are links, and their size is limited.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import GGUF_SUFFIX, INDEX_FILE, SAFETENSORS_FILES, is_gguf, local_path, split_hub_id
from outrider.wire.models.model_json import parse_object, parse_weight_map
from outrider.wire.models.tokenizer_json import TOKENIZER_JSON
from outrider.wire.peer_text import bound_text

CONFIG = "config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
TEKKEN = "tekken.json"
TOKENIZER_SOURCES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", TEKKEN, "vocab.json")
"""Names of the tokenizer files that transformers can convert to a tokenizer.json."""
MAX_BYTES = {CONFIG: 1 << 20, GENERATION: 1 << 20, INDEX_FILE: 24 << 20, TOKENIZER_JSON: 40 << 20, TEKKEN: 40 << 20}
"""Maximum size in bytes of files that are read whole, by name. Gemma 3's tokenizer.json has 32 MiB, Mistral Small 3's
tekken.json 19 MiB, DeepSeek V3's index 9 MiB. Transformers copies a configuration several times, which takes seconds at
1 MiB."""
MAX_OTHER_BYTES = 8 << 20
"""Maximum size in bytes of a file that is read whole and is not named in MAX_BYTES. Orpheus 3B's tokenizer_config.json
has 5 MiB."""

MAX_QUOTED = 400
"""Maximum length in bytes of another library's error where one of our errors quotes it. The rest is cut off, since it
may contain much of a file."""


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless a model folder has a configuration, a tokenizer and weights as safetensors.

    The message names the first file that is missing. A folder with an adapter is refused, too, since adapters are not
    applied.
    """
    check_no_adapter(str(folder))
    if _file_in(folder, CONFIG) is None:
        _refuse_gguf_folder(folder)
    _require(folder, CONFIG, "the model's configuration")
    if not _has_any(folder, TOKENIZER_SOURCES):
        _require(folder, TOKENIZER_JSON, "the tokenizer as the tokenizers library writes it")
    if weight_map(str(folder)) is None:
        _require(folder, SAFETENSORS_FILES[0], "the weights; other formats are not loaded")


def _has_any(folder: Path, names: Iterable[str]) -> bool:
    return any(_file_in(folder, name) is not None for name in names)


def check_no_adapter(model: str) -> None:
    """Raise ConfigError if a folder or hub id has an adapter, alone or with weights: adapters are not applied."""
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


def _refuse_gguf_folder(folder: Path) -> None:
    files = sorted(path.name for path in folder.glob(f"*{GGUF_SUFFIX}"))
    if not files:
        return
    name_one = ""
    if len(files) > 1:
        name_one = f"; of {len(files)} such files name one"
    raise ConfigError(
        f"{folder} has no {CONFIG} and holds GGUF: name the file, {folder}/{files[0]}{name_one}", param="model"
    )


def weight_map(model: str) -> dict[str, Path] | None:
    """Return the path of the safetensors file of each tensor by tensor name, from the index of a folder or hub id; None
    if it has no index.

    Raises ConfigError for an index that names other formats or missing files. No file of weights is opened.
    """
    index = model_file(model, INDEX_FILE)
    if index is None:
        return None
    shards = parse_weight_map(read_file(index), str(index))
    paths = {}
    for shard in sorted(set(shards.values())):
        path = model_file(model, shard)
        if path is None:
            remedy = ""
            if model_file(model, SAFETENSORS_FILES[0]) is not None:
                remedy = f"; where {SAFETENSORS_FILES[0]} has all weights, delete {INDEX_FILE}"
            raise ConfigError(
                f"{model} has no {shard} (a part of the weights that the index names){remedy}", param="model"
            )
        paths[shard] = path
    single = SAFETENSORS_FILES[0]
    if single not in paths and model_file(model, single) is not None:  # transformers would read that one instead
        raise ConfigError(
            f"{model} has {single} and an {INDEX_FILE} that does not name it; delete the one that is not meant",
            param="model",
        )
    return {tensor: paths[shard] for tensor, shard in shards.items()}


def config_name(model: str) -> str:
    """Return the name, in errors, of the file with the configuration: "the config.json of MODEL", or "the header of
    MODEL" for GGUF.
    """
    if is_gguf(model):
        return f"the header of {model}"
    return f"the {CONFIG} of {model}"


def read_model_json(model: str, name: str) -> dict[str, Any] | None:
    """Return the JSON object in the file `name` of a folder or hub id; None if it has no such file.

    Raises ConfigError for a file that is too large or is not a JSON object, for a link that leads out of the folder,
    and for a hub id of which nothing can be fetched.
    """
    path = model_file(model, name)
    if path is None:
        return None
    return parse_object(read_file(path), str(path))


def model_file(model: str, name: str) -> Path | None:
    """Return the path of the file `name` of a folder or hub id; a hub id's file is fetched to the hub's cache.

    Returns None if there is no such file, and for GGUF, which has everything in one file. Raises ConfigError for a link
    that leads out of the folder, and for a hub id of which nothing can be fetched.
    """
    if is_gguf(model):
        return None
    folder = local_path(model)
    if folder is None:
        return _hub_file(model, name)
    return _file_in(folder, name)


def gguf_path(model: str) -> Path | None:
    """Return the path of the GGUF file that the setting `model` names; it is fetched from the hub if it is not local.

    Returns None if `model` is a folder or the hub id of a repository. Raises ConfigError if there is no such file.
    """
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
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        folder = folder.parents[1]  # a snapshot in the hub's cache links to the same repository's blobs
    if not path.resolve().is_relative_to(folder):
        raise ConfigError(
            f"{path} is a link that leads out of its folder, to {path.resolve()}; copy the file there if it is meant",
            param="model",
        )


def read_file(path: Path) -> bytes:
    """Return the content of a file. Raises ConfigError for one that cannot be read or is larger than its limit in
    MAX_BYTES or MAX_OTHER_BYTES.
    """
    limit = MAX_BYTES.get(path.name, MAX_OTHER_BYTES)
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="model") from None
    if len(data) > limit:
        raise ConfigError(f"{path} has more than {limit >> 20} MiB, which is too much to be one", param="model")
    return data


def read_optional(model: str, name: str) -> bytes:
    """Return the content of the file `name` of a folder or hub id; empty if it has no such file.

    Raises ConfigError for a file that cannot be read or is too large, for a link that leads out of the folder, and for
    a hub id of which nothing can be fetched.
    """
    path = model_file(model, name)
    if path is None:
        return b""
    return read_file(path)


def _hub_file(model: str, name: str) -> Path | None:
    """Return the local copy; None where the repository has no such file, and where the hub is out of reach and its
    cache has none. Without a cached config.json, nothing was fetched before: then ConfigError is raised.
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
    """Return the first line of an error's text, at most MAX_QUOTED bytes."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return bound_text(line, MAX_QUOTED)


def unusable(model: str, error: Exception, name: str = CONFIG) -> ConfigError:
    """Return the ConfigError for a configuration for which transformers raised `error`. name: name of the file at
    fault.
    """
    shown = f"the {name} of {model}"
    if name == CONFIG:
        shown = config_name(model)
    why = bound_text(f"{type(error).__name__}: {' '.join(str(error).split())}", MAX_QUOTED)
    return ConfigError(f"transformers cannot use {shown} ({why}); correct it", param="model")
