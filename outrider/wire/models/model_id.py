"""Read the setting `model`: a folder or GGUF file here, or a model on a hub; and the names of files with weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

from outrider.wire.errors import ConfigError

INDEX = "model.safetensors.index.json"
"""Says which file holds each tensor, where there are several."""
ADDITIONAL_TEMPLATES = {name: f"additional_chat_templates/{name}.jinja" for name in ("tool_use", "rag")}
"""Files of the chat templates by name that a gateway takes in place of the default one."""
SAFE = ("model.safetensors", "medusa_lm_head.safetensors")
"""Files with all tensors; the first that is there is read."""
_PATH = re.compile(r"""(?<![\w.~/-])(?:~|\.{1,2})?/(?!/)[^\s'":,;()]*""")
"""A path in a sentence, as far as it has no spaces; no part of a hub id or of a URL."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
GGUF_SUFFIX = ".gguf"


def local_path(model: str) -> Path | None:
    """Return the folder or GGUF file that `model` names, or None for a hub id, with a file's name or without.

    Raises ConfigError when it can be none of these.
    """
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and is_gguf(model)):
        return path
    if path.exists():
        raise ConfigError(
            f"model is {model!r}, which is a file; give the folder it lies in, or a {GGUF_SUFFIX} file", param="model"
        )
    repository, file = split_hub_id(model)
    is_hub_id = _HUB_ID.fullmatch(repository) is not None and not model.startswith(".")
    if file is None and is_gguf(model):
        raise ConfigError(
            f"model is {model!r}, and there is no such file; of a hub's repository say OWNER/NAME:FILE{GGUF_SUFFIX}",
            param="model",
        )
    if not is_hub_id:
        raise ConfigError(f"model is {model!r}, and there is no such folder", param="model")
    if file is not None and not _stays_inside(file):
        raise ConfigError(
            f"model is {model!r}, and what follows the colon must be a {GGUF_SUFFIX} file of the hub's repository",
            param="model",
        )
    return None


def local_folder(model: str) -> Path | None:
    """Return the folder that `model` names, or None when it is a hub id. Raises ConfigError as `local_path`, and for a
    GGUF file.
    """
    path = local_path(model)
    if is_gguf(model):
        raise ConfigError(f"model is {model!r}, a GGUF file; give a folder with safetensors", param="model")
    return path


def is_gguf(model: str) -> bool:
    """Return whether the setting names a GGUF file, here or on a hub."""
    return model.lower().endswith(GGUF_SUFFIX)


def split_hub_id(model: str) -> tuple[str, str | None]:
    """Return the repository and the GGUF file of a hub id, None where it names no file."""
    repository, colon, file = model.partition(":")
    return (repository, file) if colon else (model, None)


def _stays_inside(file: str) -> bool:
    parts = file.split("/")
    return is_gguf(file) and not any(part in ("", ".", "..") for part in parts)


def full_name(model: str) -> str:
    """Return `WorkerInfo.model_id` for the setting `model`: the absolute path of what is here, or a hub id as it is.

    A relative path of two folders looks like a hub id, and only a process on the model's machine can tell them apart.
    """
    path = os.path.abspath(os.path.expanduser(model))
    return path if os.path.exists(path) else model


def short_name(model: str) -> str:
    """Return the name in ids, metrics and messages of a model by its `full_name`: the last folder of a path, a GGUF
    file's name without its suffix, or a hub id as it is.

    A path itself stands in the log alone: who asks for metrics need not know the server's disk.
    """
    if not model.startswith(("/", ".", "~")):
        return model
    name = os.path.basename(os.path.abspath(os.path.expanduser(model))) or "model"
    return name[: -len(GGUF_SUFFIX)] if is_gguf(name) and len(name) > len(GGUF_SUFFIX) else name


def without_folders(text: str, model: str) -> str:
    """Return a sentence for users: the model by its short name, and of any other path the last part alone."""
    if model.startswith(("/", "~", "./", "../")):
        text = text.replace(model, short_name(model))
    return _PATH.sub(lambda found: os.path.basename(found[0].rstrip("/")), text)
