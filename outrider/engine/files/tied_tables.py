"""Check that the embedding and the output projection are one tensor or two, as config.json states. Used by the loader.

Transformers ties them for some classes whatever config.json states (T5), copies one if the other is missing, and loads
both if they differ although they should be one. It reports none of this as a missing tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.files.model_files import CONFIG, read_model_json
from outrider.wire.errors import ConfigError

TIES = ("tie_word_embeddings", "tie_embedding")
"""Fields of config.json that state whether embedding and output projection are one tensor. The second is LFM2's."""
IN_LAYER = re.compile(r"(^|\.)(layers\.\d+|mtp)\.")
"""Pattern of names of tensors inside a layer. The search for the model's embedding skips them, since the MTP heads of a
checkpoint have copies of it in their layers."""


def check_tied_names(model: str, network: PreTrainedModel, stored: Iterable[str]) -> None:
    """Raise ConfigError if config.json states that embedding and output projection are two tensors, and the files have
    only one of them. transformers would use that one for both.

    network: on the meta device. stored: names of the tensors in the files.
    """
    ties: dict[str, str] = network.all_tied_weights_keys
    head = _head_name(network)
    if head not in ties or _is_tied(model, network.config):
        return
    source = ties[head]
    embeddings = [source]
    for name, tied_to in ties.items():
        if tied_to == source and name != head:
            embeddings.append(name)
    stored_modules = {_last_module(name) for name in stored if not IN_LAYER.search(name)}
    for tables in ([head], embeddings):
        if stored_modules.isdisjoint(map(_last_module, tables)):
            raise ConfigError(
                f"the weights of {model} lack {tables[0]}: by its {CONFIG} ({TIES[0]} false) embedding and output are "
                "two tables, and one of them is there; get the weights again",
                param="model",
            )


def check_tied_weights(model: str, network: PreTrainedModel) -> None:
    """Raise ConfigError if config.json states that embedding and output projection are one tensor, and the files have
    two with different values.
    """
    head = _head_name(network)
    source = network.get_expanded_tied_weights_keys(all_submodels=True).get(head)
    if source is None or head in network.all_tied_weights_keys or not _is_tied(model, network.config):
        return
    raise ConfigError(
        f"the weights of {model} have {head} and {source} with other values, and by its {CONFIG} they are one "
        f"({TIES[0]}); set that to false there to serve both, or delete {head} from the weights",
        param="model",
    )


def _is_tied(model: str, config: PreTrainedConfig) -> bool:
    # by config.json as it is written, for the whole model or for a part of it; else by the default of the class
    raw = read_model_json(model, CONFIG) or {}
    stated = _stated_ties(raw)
    for part in raw.values():
        if isinstance(part, dict):
            stated += _stated_ties(part)
    if stated:
        return any(stated)
    return bool(getattr(config, TIES[0], False))


def _stated_ties(part: dict[str, Any]) -> list[bool]:
    return [part[name] for name in TIES if isinstance(part.get(name), bool)]


def _head_name(network: PreTrainedModel) -> str | None:
    head = network.get_output_embeddings()
    for name, module in network.named_modules():
        if module is head:
            return f"{name}.weight"
    return None


def _last_module(name: str) -> str:
    # model.language_model.embed_tokens.weight -> embed_tokens: files and networks differ in prefixes
    if "." not in name:
        return name
    return name.split(".")[-2]
