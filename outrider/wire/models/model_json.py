"""Parse JSON files of a model folder. Whoever made the folder, what is wrong with a file is one ConfigError that names
it. Used by whoever reads such a file: workers, gateway and command line.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any

from outrider.wire.errors import ConfigError

SHARD_SUFFIX = ".safetensors"
MAX_CONTAINERS = 1 << 21
"""Lists and objects of a file: 130 MB in Python. A tokenizer.json has one for each merge, Gemma 3's half a million."""


def parse_object(data: bytes, name: str) -> dict[str, Any]:
    """Return the object that `data` holds. name: of the file. Raises ConfigError for anything else."""
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise ConfigError(f"{name} has more than {MAX_CONTAINERS} lists and objects", param="model")
    try:
        found = json.loads(data)
    except RecursionError:
        raise ConfigError(f"{name} is not JSON that can be read: it nests too deeply", param="model") from None
    except ValueError as error:  # also bytes that are no UTF-8, and integers of too many digits
        raise ConfigError(f"{name} is not JSON: {error}", param="model") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is no JSON object", param="model")
    return found


def decode_text(data: bytes, name: str) -> str:
    """Return the text that `data` holds in UTF-8. name: of the file. Raises ConfigError."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is no text in UTF-8: {error}", param="model") from None


def parse_weight_map(data: bytes, name: str) -> dict[str, str]:
    """Return the file that an index of weights names for each tensor. name: of the index.

    Raises ConfigError unless each is a safetensors file beside the index: what else is named would be opened as a
    pickle, or lie outside the folder.
    """
    weight_map = parse_object(data, name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{name} is not an index of weights; save the model again", param="model")
    for tensor, shard in weight_map.items():
        if not _is_shard_name(shard):
            raise ConfigError(
                f"{name} says that {reprlib.repr(tensor)} is in {reprlib.repr(shard)}, which must be the name of a "
                f"{SHARD_SUFFIX} file beside it; save the model again as safetensors",
                param="model",
            )
    return weight_map


def _is_shard_name(shard: object) -> bool:
    if not isinstance(shard, str) or not shard.endswith(SHARD_SUFFIX):
        return False
    return not any(character in shard for character in "/\\\0")
