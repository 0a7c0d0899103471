"""Read the setting `model`: a folder here, or a model on a hub; and the names of the files with its weights."""

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


def local_folder(model: str) -> Path | None:
    """Return the folder that `model` names, or None when it is a hub id. Raises ConfigError when it can be neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model is {model!r}, which is a file; give the folder it lies in", param="model")
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise ConfigError(f"model is {model!r}, and there is no such folder", param="model")
    return None


def full_name(model: str) -> str:
    """Return `WorkerInfo.model_id` for the setting `model`: the absolute path of a local folder, or a hub id as it is.

    A relative path of two folders looks like a hub id, and only a process on the model's machine can tell them apart.
    """
    path = os.path.abspath(os.path.expanduser(model))
    return path if os.path.isdir(path) else model


def short_name(model: str) -> str:
    """Return the name in ids, metrics and messages of a model by its `full_name`: the last folder of a path, or a hub
    id as it is.

    A path itself stands in the log alone: who asks for metrics need not know the server's disk.
    """
    if not model.startswith(("/", ".", "~")):
        return model
    return os.path.basename(os.path.abspath(os.path.expanduser(model))) or "model"


def without_folders(text: str, model: str) -> str:
    """Return a sentence for users: the model by its short name, and of any other path the last part alone."""
    if model.startswith(("/", "~", "./", "../")):
        text = text.replace(model, short_name(model))
    return _PATH.sub(lambda found: os.path.basename(found[0].rstrip("/")), text)
