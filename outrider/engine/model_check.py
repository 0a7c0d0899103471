"""Check the files of a target, a draft model or a head without loading it. Called by `checkup`.

Of a model, the configuration, the tokenizer and the headers of the weights are read. Of a head the tensors are read,
too: their shapes show for which target it was trained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import nn

from outrider.drafting.translation import Intersection, create_translation
from outrider.engine.architectures.context import context_limit_of
from outrider.engine.architectures.layer_memory import token_width
from outrider.engine.architectures.text_part import served_class
from outrider.engine.files.ends import decoder_start_of, read_ends, read_generation
from outrider.engine.files.model_files import check_folder
from outrider.engine.files.tokenizer_files import read_tokenizer, tokens_beyond
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.head_loader import dtype_of
from outrider.engine.heads.kinds import PARD, HeadKind, is_same, kind_of, pard_block
from outrider.engine.loading.loader import check_class, check_weights, read_config, resolve_device
from outrider.engine.loading.weight_source import WeightSource
from outrider.engine.memory import readable_bytes
from outrider.engine.quantization.quantize import method_of
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.models.fingerprint import first_difference, tokenizer_fingerprint
from outrider.wire.models.model_id import full_name, local_path
from outrider.wire.models.pair import describe_incompatibility, has_same_tokens, is_compatible

Find = tuple[Literal["ok", "warning", "problem"], str, str]
"""Result of one check: ok, warning or problem; what was found; and the remedy (empty if none is needed)."""


@dataclass(frozen=True, slots=True)
class CheckTask:
    """What to check: a target, its drafts, and the device on which they are to run."""

    target: str | None
    """Folder or hub id of the target; None = only the machine is checked."""
    drafts: list[str]
    """Folders or hub ids of the draft models and heads."""
    device: str
    """Device, written as in the workers' setting `device`."""
    dtype: str
    """Dtype of the weights, written as in the workers' setting `dtype`."""

    @classmethod
    def read(cls, line: str) -> Self:
        """Return the task that a line of JSON contains, which `outrider doctor` sends to the process that checks."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a model or a head would take after loading."""

    weights_bytes: int
    """Size of the weights in bytes, in the dtype in which they would be loaded."""
    kv_bytes: int
    """Approximate size in bytes of the KV cache for one context of full length."""


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """Facts for `outrider doctor` that the files of a decoder-only or encoder-decoder model state."""

    info: pb.WorkerInfo
    """Description that a worker of this model would give in GetInfo, as far as it follows from the files."""
    files: pb.TokenizerFiles
    """Files of the model's tokenizer and its chat templates."""
    footprint: Footprint
    """Memory that the model would take."""
    class_name: str
    """Name of the transformers class that runs the model."""
    notes: tuple[str, ...] = ()
    """Sentences about contents of the files that a user may not expect."""

    def __str__(self) -> str:
        info = self.info
        footprint = self.footprint
        part = ""
        if info.is_text_only:
            part = ", text only"
        return (
            f"{self.class_name}{part}, context {info.context_limit}, vocabulary {info.vocab_size}, weights "
            f"{readable_bytes(footprint.weights_bytes)}, KV cache about {readable_bytes(footprint.kv_bytes)} a full "
            "context"
        )


def read_model(model: str, task: CheckTask) -> CheckedModel:
    """Check the files of a model without reading its weights. Return the facts that they state.

    Raises ConfigError if a worker could not load the model.
    """
    path = local_path(model)
    if path is not None and path.is_dir():
        check_folder(path)
    config = read_config(model)
    check_class(config)
    text = config.get_text_config(decoder=True)
    tokenizer = read_tokenizer(model)
    files = tokenizer.files
    ends = read_ends(model, config)
    start = decoder_start_of(config, read_generation(model, config))
    limit = context_limit_of(config, None)
    source = WeightSource.find(model, config, resolve_device(task.device), "none")
    itemsize = _itemsize(source, task)
    network = check_weights(model, source.config, source)
    info = pb.WorkerInfo(
        model_id=full_name(model),
        vocab_size=text.vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint(files.tokenizer_json),
        context_limit=limit,
        eos_token_ids=ends.ids,
        decoder_start_ids=start,
        supports_retokenization=not start,
        is_text_only=served_class(config).is_text_part,
    )
    if path is not None and method_of(source.config) is not None:  # loaded as it is stored
        weights_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    else:
        weights_bytes = _num_parameters(network) * itemsize
    notes = list[str]()
    for note in (ends.difference, tokens_beyond(tokenizer.tokenizer, text.vocab_size)):
        if note is not None:
            notes.append(note)
    footprint = Footprint(weights_bytes, token_width(config) * itemsize * limit)
    return CheckedModel(info, files, footprint, type(network).__name__, tuple(notes))


def _num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())  # tied ones count once


def check_draft(draft: str, target: CheckedModel, task: CheckTask) -> tuple[Footprint, tuple[str, ...], Find]:
    """Return the footprint of a draft, the notes on its files (sentences about contents that a user may not expect),
    and the result of the check whether the draft fits the target.

    draft: folder, GGUF file or hub id of a model or head. Raises ConfigError if it cannot draft for the target.
    """
    assert task.target is not None
    files = Checkpoint(draft)
    kind = kind_of(files, task.target)
    if kind.read is not None:
        head = kind.read(files, TargetFiles(task.target))
        taps = head.projection.spec.taps
        find: Find = ("ok", f"a head ({kind.name}) that fits the target; reads its hidden states {taps}", "")
        return _head_footprint(kind, head, target.info.context_limit, task), (), find
    model = read_model(draft, task)
    if kind is PARD:
        pard_block(files)
        model.info.supports_retokenization = False
    if not is_compatible(model.info, target.info):
        difference = first_difference(target.files.tokenizer_json, model.files.tokenizer_json)
        raise ConfigError(describe_incompatibility(model.info, target.info, difference))
    if is_same(draft, task.target):
        find = ("warning", "the draft is the target itself: nothing gets faster", "name a smaller model")
        return model.footprint, model.notes, find
    return model.footprint, model.notes, _check_tokens(model, target)


def _head_footprint(kind: HeadKind, head: HeadFiles, context_limit: int, task: CheckTask) -> Footprint:
    assert kind.network is not None, "a head has a network"
    network = kind.network.of(head.facts, head.tensors)
    itemsize = dtype_of(head.tensors, resolve_device(task.device), task.dtype).itemsize
    projection_bytes = head.projection.num_bytes  # run by the target, for the head alone
    weights_bytes = _num_parameters(network) * itemsize + projection_bytes
    kv_bytes = 0
    if kind.paths:
        kv_bytes = token_width(network.config) * itemsize * context_limit
    return Footprint(weights_bytes, kv_bytes)


def _check_tokens(draft: CheckedModel, target: CheckedModel) -> Find:
    # Raises ConfigError where the two tokenizers have no token in common.
    sizes = (target.info.vocab_size, draft.info.vocab_size)
    shared = None
    if not has_same_tokens(draft.info, target.info):
        shared = create_translation(
            target.files.tokenizer_json, draft.files.tokenizer_json, *sizes, draft.info.eos_token_ids
        )
    if isinstance(shared, Intersection):
        found = (
            f"{draft}; another tokenizer, works by translation: {shared.num_shared} of the smaller vocabulary's "
            f"{shared.num_texts} tokens ({shared.shared_fraction:.0%}) are one in both"
        )
    else:
        found = f"{draft}; the target's tokens"
    if draft.info.context_limit < target.info.context_limit:
        shorter = f"no drafts past token {draft.info.context_limit}, and answers may have {target.info.context_limit}"
        return "warning", f"{found}; {shorter}", "fine for short answers; else a draft with a longer context"
    return "ok", found, ""


def _itemsize(source: WeightSource, task: CheckTask) -> int:
    dtype = source.dtype(resolve_device(task.device), task.dtype)
    if not isinstance(dtype, torch.dtype):  # "auto": the dtype that they are stored in
        dtype = getattr(source.config, "dtype", None) or torch.float32
    return dtype.itemsize
