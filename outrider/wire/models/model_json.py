"""Parsers for the JSON files of a model folder, used by workers, gateway and command line.

The folder is not trusted: any fault of a file raises a ConfigError that names the file.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any

from outrider.wire.errors import ConfigError

SHARD_SUFFIX = ".safetensors"
MAX_CONTAINERS = 1 << 21
"""Maximum number of lists and objects in a JSON file. That many take 130 MB in Python. A tokenizer.json has one list
for each merge of its BPE model: Gemma 3's has half a million."""


def parse_object(data: bytes, name: str) -> dict[str, Any]:
    """Parse the content of a JSON file whose top level is an object. name: file name, for errors.

    Raises ConfigError if it is not a JSON object, or has more than MAX_CONTAINERS lists and objects.
    """
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
    """Decode the content of a UTF-8 file. name: file name, for errors. Raises ConfigError if it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is no text in UTF-8: {error}", param="model") from None


def parse_weight_map(data: bytes, name: str) -> dict[str, str]:
    """Parse a weights index such as model.safetensors.index.json. Return, by tensor name, the name of the file that has
    the tensor.

    name: file name of the index, for errors. Raises ConfigError unless every named file is a safetensors file in the
    folder of the index. (Any other file could be opened as a pickle, or lie outside the folder.)
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
    return set("/\\\0").isdisjoint(shard)
