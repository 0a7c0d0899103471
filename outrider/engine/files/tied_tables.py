"""Check that embedding and output come from the tensors that config.json, as it is written, asks for.

transformers changes what some configurations say (T5's tables are always one to it), takes one table of a tied group
for a missing other, and serves both where they differ. It reports none of this as a missing tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.files.model_files import CONFIG, read_model_json
from outrider.wire.errors import ConfigError

TIES = ("tie_word_embeddings", "tie_embedding")
"""Fields of config.json that say whether embedding and output are one table; the second is LFM2's."""
IN_LAYER = re.compile(r"(^|\.)(layers\.\d+|mtp)\.")
"""In names of what belongs to a layer: MTP heads inside a checkpoint have a copy of the embedding."""


def check_tied_names(model: str, network: PreTrainedModel, stored: Iterable[str]) -> None:
    """Raise ConfigError where transformers would take one table for two.

    network: on the meta device. stored: names of the tensors in the files.
    """
    ties: dict[str, str] = network.all_tied_weights_keys
    head = _head_name(network)
    if head not in ties or _is_tied(model, network.config):
        return
    source = ties[head]
    embeddings = [source, *(name for name in ties if ties[name] == source and name != head)]
    modules = {_last_module(name) for name in stored if not IN_LAYER.search(name)}
    for tables in ([head], embeddings):
        if modules.isdisjoint(map(_last_module, tables)):
            raise ConfigError(
                f"the weights of {model} lack {tables[0]}: by its {CONFIG} ({TIES[0]} false) embedding and output are "
                "two tables, and one of them is there; get the weights again",
                param="model",
            )


def check_tied_weights(model: str, network: PreTrainedModel) -> None:
    """Raise ConfigError for a loaded network with two tables where config.json says that they are one."""
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
    """Return whether embedding and output are one by config.json as it is written, for the whole or for a part."""
    raw = read_model_json(model, CONFIG) or {}
    parts: list[dict[str, Any]] = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    stated = [part[name] for part in parts for name in TIES if isinstance(part.get(name), bool)]
    return any(stated) if stated else bool(getattr(config, TIES[0], False))


def _head_name(network: PreTrainedModel) -> str | None:
    """Return the name of the output's table."""
    head = network.get_output_embeddings()
    return next((f"{name}.weight" for name, module in network.named_modules() if module is head), None)


def _last_module(name: str) -> str:
    """Return the module that a tensor is of, without those around it: files and networks differ in prefixes."""
    return name.split(".")[-2] if "." in name else name
