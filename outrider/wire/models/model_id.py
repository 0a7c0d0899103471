"""The setting `model`: a folder or GGUF file on this machine, or a model on a hub; and names of files of a model.

Called by workers and launcher, and by the gateway for names in messages.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from outrider.wire.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
"""File that maps tensors to files, where the weights are in several."""
ADDITIONAL_TEMPLATES = {
    "tool_use": "additional_chat_templates/tool_use.jinja",
    "rag": "additional_chat_templates/rag.jinja",
}
"""Files by name of the chat templates that a gateway uses in place of the default one."""
SAFETENSORS_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
"""Names of a file with all tensors; the first that exists is read."""
_PATH = re.compile(r"""(?<![\w.~/-])(?:~|\.{1,2})?/(?!/)[^\s'":,;()]*""")
"""A path without spaces in a sentence; neither a part of a hub id nor of a URL."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
GGUF_SUFFIX = ".gguf"


def local_path(model: str) -> Path | None:
    """Return the folder or GGUF file that `model` names, or None for a hub id (OWNER/NAME or OWNER/NAME:FILE.gguf).

    Raises ConfigError when it is none of these.
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
    """Return the folder that `model` names, or None for a hub id. Raises ConfigError as `local_path`, and for a GGUF
    file.
    """
    path = local_path(model)
    if is_gguf(model):
        raise ConfigError(f"model is {model!r}, a GGUF file; give a folder with safetensors", param="model")
    return path


def is_gguf(model: str) -> bool:
    """Return whether the setting names a GGUF file, on this machine or on a hub."""
    return model.lower().endswith(GGUF_SUFFIX)


def split_hub_id(model: str) -> tuple[str, str | None]:
    """Return the repository and the GGUF file of a hub id; the file is None where the id names none."""
    repository, colon, file = model.partition(":")
    if not colon:
        return model, None
    return repository, file


def _stays_inside(file: str) -> bool:
    return is_gguf(file) and {"", ".", ".."}.isdisjoint(file.split("/"))


def full_name(model: str) -> str:
    """Return `WorkerInfo.model_id` for the setting `model`: the absolute path of what exists here, else the hub id.

    Call it on the model's machine: elsewhere a relative path of two folders cannot be told from a hub id.
    """
    path = os.path.abspath(os.path.expanduser(model))
    if os.path.exists(path):
        return path
    return model


def short_name(model: str) -> str:
    """Return a model's name for ids, metrics and messages, from its `full_name`: the last folder of a path, a GGUF
    file's name without its suffix, or a hub id as it is.

    Only the log shows the path: readers of metrics need not learn about the server's disk.
    """
    # "/models/llama.gguf": "llama"; "org/llama": "org/llama"
    if not model.startswith(("/", ".", "~")):
        return model
    name = os.path.basename(os.path.abspath(os.path.expanduser(model))) or "model"
    if is_gguf(name) and len(name) > len(GGUF_SUFFIX):
        return name[: -len(GGUF_SUFFIX)]
    return name


def without_folders(text: str, model: str) -> str:
    """Return a sentence with the model's path replaced by its short name, and any other path by its last part."""
    if model.startswith(("/", "~", "./", "../")):
        text = text.replace(model, short_name(model))
    return _PATH.sub(lambda found: os.path.basename(found[0].rstrip("/")), text)
