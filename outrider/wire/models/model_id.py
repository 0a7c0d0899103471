"""Functions that interpret the setting `model` (a folder or GGUF file on this machine, or a hub id), and names of a
model's files.

Called by workers and launcher, and by the gateway for model names in messages.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from outrider.wire.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
"""Name of the file that gives, for each tensor of a model, the weights file that has it. A model with a single weights
file has no such file."""
ADDITIONAL_TEMPLATES = {
    "tool_use": "additional_chat_templates/tool_use.jinja",
    "rag": "additional_chat_templates/rag.jinja",
}
"""File names of further chat templates in a model folder, by template name. A gateway uses one of them in place of the
default template for requests with tools or documents."""
SAFETENSORS_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
"""Possible names of the weights file of a model that has only one. The first that exists is read."""
_PATH = re.compile(r"""(?<![\w.~/-])(?:~|\.{1,2})?/(?!/)[^\s'":,;()]*""")
"""Matches a path without spaces inside a sentence. It does not match parts of hub ids or URLs."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
GGUF_SUFFIX = ".gguf"


def local_path(model: str) -> Path | None:
    """Return the path of the folder or GGUF file that the setting `model` names. None = it is a hub id (OWNER/NAME or
    OWNER/NAME:FILE.gguf).

    Raises ConfigError if it is neither.
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
    """Return the path of the folder that the setting `model` names. None = it is a hub id.

    Raises ConfigError for a GGUF file, and if `model` is neither a folder nor a hub id.
    """
    path = local_path(model)
    if is_gguf(model):
        raise ConfigError(f"model is {model!r}, a GGUF file; give a folder with safetensors", param="model")
    return path


def is_gguf(model: str) -> bool:
    """Return whether the setting `model` names a GGUF file, either on this machine or in a repository of a hub."""
    return model.lower().endswith(GGUF_SUFFIX)


def split_hub_id(model: str) -> tuple[str, str | None]:
    """Split a hub id into its repository (OWNER/NAME) and the name of its GGUF file. The latter is None for an id that
    names no file.
    """
    repository, colon, file = model.partition(":")
    if not colon:
        return model, None
    return repository, file


def _stays_inside(file: str) -> bool:
    return is_gguf(file) and {"", ".", ".."}.isdisjoint(file.split("/"))


def full_name(model: str) -> str:
    """Return the full name of the model that the setting `model` names: the absolute path if that path exists on this
    machine, otherwise the hub id. Workers report it as `WorkerInfo.model_id`.

    Call it on the machine that has the model. On any other machine a relative path such as folder/model looks like a
    hub id.
    """
    path = os.path.abspath(os.path.expanduser(model))
    if os.path.exists(path):
        return path
    return model


def short_name(model: str) -> str:
    """Return the short name of a model, a path or hub id, for ids, metrics and messages. It is the last folder of a
    path, the name of a GGUF file without its suffix, or the whole hub id.

    Only the log shows full paths, so that metrics and replies reveal nothing about the server's disk.
    """
    # "/models/llama.gguf": "llama"; "org/llama": "org/llama"
    if not model.startswith(("/", ".", "~")):
        return model
    name = os.path.basename(os.path.abspath(os.path.expanduser(model))) or "model"
    if is_gguf(name) and len(name) > len(GGUF_SUFFIX):
        return name[: -len(GGUF_SUFFIX)]
    return name


def without_folders(text: str, model: str) -> str:
    """Return a sentence without names of folders: the path of `model` is replaced by the model's short name, and any
    other path by its last part. Replies with such a sentence reveal nothing about the server's disk.
    """
    if model.startswith(("/", "~", "./", "../")):
        text = text.replace(model, short_name(model))
    return _PATH.sub(lambda found: os.path.basename(found[0].rstrip("/")), text)
