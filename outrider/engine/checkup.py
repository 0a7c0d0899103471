"""Check the devices of this machine and the files of a target and its drafts, before any worker is started.

`doctor` runs it as `python -m outrider.engine.checkup` with a `Task` in JSON on stdin; it prints a JSON object for each
finding. Of a model it reads the configuration, the tokenizer and the headers of the weights. Of a head it reads the
tensors too: their shapes show for which target it was trained.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import torch
from torch import nn

from outrider.drafting.translation import Intersection, between
from outrider.engine import memory
from outrider.engine.architectures.context import context_limit_of
from outrider.engine.architectures.layer_memory import token_width
from outrider.engine.architectures.text_part import served_class
from outrider.engine.attention.varlen_attention import torch_refusal
from outrider.engine.files.ends import decoder_start_of, read_ends, read_generation
from outrider.engine.files.model_files import check_folder
from outrider.engine.files.tokenizer_files import read_tokenizer, tokenizers_read_once, tokens_beyond
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.families import PARD, Family, family_of, is_same, pard_block
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.loader import dtype_of
from outrider.engine.loading.loader import check_class, check_weights, read_config, resolve_device
from outrider.engine.loading.weight_source import WeightSource
from outrider.engine.memory import readable_bytes
from outrider.engine.native.build import BuildError, check_writable, library_place
from outrider.engine.quantization.quantize import method_of
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.models.fingerprint import first_difference, tokenizer_fingerprint
from outrider.wire.models.model_id import full_name, local_path
from outrider.wire.models.pair import fits, has_same_tokens, misfit
from outrider.wire.processes.processes import tell
from outrider.wire.settings.gpu_shares import needed_bytes, share_of, utilization_of

GPU_DEVICE = Path("/dev/nvidiactl")
"""A device file that exists where an NVIDIA driver is loaded."""
Find = tuple[Literal["ok", "warning", "problem"], str, str]
"""Result of one check: its state, what was found, and the remedy (empty where none is needed)."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to check: a target, its drafts, and the device that they are to run on."""

    target: str | None
    """Folder or hub id of the target; None to check the machine alone."""
    drafts: list[str]
    """Folder or hub id of each draft model or head."""
    device: str
    """Device, as the workers' setting `device`."""
    dtype: str
    """Dtype of the weights, as the workers' setting `dtype`."""

    @classmethod
    def read(cls, line: str) -> Self:
        """Parse a task from a line of JSON."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a model or a head would take."""

    weights_bytes: int
    """Bytes of the weights in the dtype that they would be loaded in."""
    kv_bytes: int
    """About the bytes of the KV cache of one context of full length."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the files of a decoder or an encoder-decoder model state."""

    info: pb.WorkerInfo
    """Facts that a worker of this model would report, as far as they follow from the files."""
    tokenizer_json: bytes
    """Contents of tokenizer.json."""
    footprint: Footprint
    """Memory that the model would take."""
    class_name: str
    """Name of the class of transformers that runs it."""
    notes: tuple[str, ...] = ()
    """Sentences about contents of the files that a user may not expect."""

    def __str__(self) -> str:
        info = self.info
        footprint = self.footprint
        part = ""
        if info.text_only:
            part = ", text only"
        return (
            f"{self.class_name}{part}, context {info.context_limit}, vocabulary {info.vocab_size}, weights "
            f"{readable_bytes(footprint.weights_bytes)}, KV cache about {readable_bytes(footprint.kv_bytes)} a full "
            "context"
        )


def findings(task: Task) -> Iterator[tuple[str, Find]]:
    """Run all checks of a task; yield the name of each and its result."""
    yield "GPU", gpu()
    yield "C++ forward", native()
    has_device = True
    try:
        resolve_device(task.device)
    except ConfigError as error:
        has_device, task = False, replace(task, device="cpu")
        yield "device", ("problem", error.message, "")
    if task.target is None:
        return
    try:
        target = read_model(task.target, task)
    except ConfigError as error:
        yield "target", _refusal(error, task.target)
        skipped = [f"draft {draft}" for draft in task.drafts]
        skipped.append("memory")
        yield "skipped", ("warning", f"{', '.join(skipped)}, for which the target is needed", "")
        return
    yield "target", ("ok", str(target), "")
    if target.notes:
        yield "files of the target", ("warning", "; ".join(target.notes), "")
    footprints = dict[str, Footprint]()
    for draft in task.drafts:
        try:
            footprints[draft], notes, find = check_draft(draft, target, task)
        except ConfigError as error:
            yield f"draft {draft}", _refusal(error, draft)
            continue
        yield f"draft {draft}", find
        if notes:
            yield f"files of the draft {draft}", ("warning", "; ".join(notes), "")
    if not has_device:
        yield "skipped", ("warning", "memory, for which the device is needed", "")
        return
    if not footprints:
        yield "memory", room([target.footprint], task.device)
    for draft, footprint in footprints.items():
        check = "memory" if len(footprints) == 1 else f"memory with {draft}"
        yield check, room([target.footprint, footprint], task.device)


def _refusal(error: ConfigError, model: str) -> Find:
    try:
        is_hub_id = local_path(model) is None
    except ConfigError:
        is_hub_id = False
    remedy = ""
    if is_hub_id:
        remedy = f"a hub id is read once it is here: outrider pull {model}"
    return "problem", error.message, remedy


def gpu() -> Find:
    """Check that torch reaches the GPUs of the machine, and that its version has flash attention for them."""
    has_device = GPU_DEVICE.exists() or shutil.which("nvidia-smi") is not None
    num_gpus = 0
    with warnings.catch_warnings(record=True) as caught:  # torch warns of a driver that is too old
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            num_gpus = torch.cuda.device_count()
    if num_gpus:
        found = f"{num_gpus} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
        refusal = torch_refusal(torch.__version__)
        if refusal is None:
            return "ok", found, ""
        return "warning", f"{found}; no path flash, and so no CUDA graphs: {refusal}", "pip install 'torch>=2.13'"
    if not has_device:
        return "ok", "none; workers run on the CPU", ""
    if torch.version.cuda is None:
        install = "pip install --force-reinstall torch, with the --index-url of PyTorch's builds for CUDA"
        return "problem", f"the machine has one, and torch {torch.__version__} was built for CPUs", install
    why = "torch finds no device"
    if caught:
        why = str(caught[0].message).splitlines()[0]
    remedy = f"install a driver for CUDA {torch.version.cuda} or later, or let the container see the devices"
    return "problem", f"the machine has one, and torch {torch.__version__} does not reach it: {why}", remedy


def native() -> Find:
    """Check that the C++ library is compiled, or can be compiled at the first start."""
    try:
        path, compiler = library_place()
        if not path.exists():
            check_writable(path.parent)
    except BuildError as error:
        return (
            "warning",
            f"{error}",
            "without it Llama-like models on a CPU, and sampling on any device, run slowly",
        )
    if path.exists():
        return "ok", f"compiled, {path}", ""
    return "ok", f"{compiler} compiles it at the first start, half a minute, into {path.parent}", ""


def read_model(model: str, task: Task) -> Model:
    """Check the files of a model without reading its weights, and return what they state.

    Raises ConfigError where the worker's loader would.
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
        translates=not start,
        text_only=served_class(config).is_text_part,
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
    return Model(info, files.tokenizer_json, footprint, type(network).__name__, tuple(notes))


def _num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())  # tied ones count once


def check_draft(draft: str, target: Model, task: Task) -> tuple[Footprint, tuple[str, ...], Find]:
    """Return the footprint of a draft, the notes on its files (as `Model.notes`), and whether it serves the target.

    Raises ConfigError where it cannot draft for the target.
    """
    assert task.target is not None
    files = Checkpoint(draft)
    family = family_of(files, task.target)
    if family.read is not None:
        head = family.read(files, TargetFiles(task.target))
        taps = head.opening.spec.taps
        find: Find = ("ok", f"a head ({family.name}) that fits the target; reads its hidden states {taps}", "")
        return _head_footprint(family, head, target.info.context_limit, task), (), find
    model = read_model(draft, task)
    if family is PARD:
        pard_block(files)
        model.info.translates = False
    if not fits(model.info, target.info):
        difference = first_difference(target.tokenizer_json, model.tokenizer_json)
        raise ConfigError(misfit(model.info, target.info, difference))
    if is_same(draft, task.target):
        find = ("warning", "the draft is the target itself: nothing gets faster", "name a smaller model")
        return model.footprint, model.notes, find
    return model.footprint, model.notes, _check_tokens(model, target)


def _head_footprint(family: Family, head: HeadFiles, context_limit: int, task: Task) -> Footprint:
    assert family.network is not None, "a head has a network"
    network = family.network.of(head.facts, head.tensors)
    itemsize = dtype_of(head.tensors, resolve_device(task.device), task.dtype).itemsize
    projection_bytes = head.opening.num_bytes  # run by the target, for the head alone
    weights_bytes = _num_parameters(network) * itemsize + projection_bytes
    kv_bytes = 0
    if family.paths:
        kv_bytes = token_width(network.config) * itemsize * context_limit
    return Footprint(weights_bytes, kv_bytes)


def _check_tokens(draft: Model, target: Model) -> Find:
    # Raises ConfigError where the two tokenizers have no token in common.
    sizes = (target.info.vocab_size, draft.info.vocab_size)
    shared = None
    if not has_same_tokens(draft.info, target.info):
        shared = between(target.tokenizer_json, draft.tokenizer_json, *sizes, draft.info.eos_token_ids)
    if isinstance(shared, Intersection):
        found = (
            f"{draft}; another tokenizer, works by translation: {shared.num_shared} of the smaller vocabulary's "
            f"{shared.num_texts} tokens ({shared.share:.0%}) are one in both"
        )
    else:
        found = f"{draft}; the target's tokens"
    if draft.info.context_limit < target.info.context_limit:
        shorter = f"no drafts past token {draft.info.context_limit}, and answers may have {target.info.context_limit}"
        return "warning", f"{found}; {shorter}", "fine for short answers; else a draft with a longer context"
    return "ok", found, ""


def room(models: list[Footprint], device_name: str) -> Find:
    """Check that the weights of all models and a full context of each fit into the free memory of the device."""
    device = resolve_device(device_name)
    free = memory.free_memory_bytes(device)
    weights = caches = 0
    for model in models:
        weights += model.weights_bytes
        caches += model.kv_bytes
    found = (
        f"{readable_bytes(weights)} of weights, {readable_bytes(caches)} for a full context of each model; "
        f"{readable_bytes(free)} free on {device}"
    )
    if device.type == "cuda" and len(models) > 1:
        shares, is_too_small = _gpu_shares(models, device)
        found = f"{found}; {shares}"
        if is_too_small:
            return "problem", found, "set gpu_memory_utilization for each, or give each a GPU of its own"
    if weights > free:
        quantized = "a quantised checkpoint"
        if device.type == "cpu":
            quantized = "int8 (quantization)"
        return "problem", found, f"free some, or take --dtype bfloat16, {quantized} or a smaller model"
    if weights + caches > free:
        return "warning", found, "long requests will be refused: free some, or set context_limit"
    return "ok", found, ""


def _gpu_shares(models: list[Footprint], device: torch.device) -> tuple[str, bool]:
    # Also returns whether the share of one is too small for its weights.
    total = torch.cuda.mem_get_info(device)[1]
    needed = sum(needed_bytes(model.weights_bytes) for model in models)
    shares = list[str]()
    is_too_small = False
    for model in models:
        value = utilization_of(share_of(needed_bytes(model.weights_bytes), needed))
        shares.append(f"{readable_bytes(int(value * total))} ({value:g})")
        is_too_small = is_too_small or model.weights_bytes > value * total
    return f"on one GPU they share it, gpu_memory_utilization in order: {', '.join(shares)}", is_too_small


def _itemsize(source: WeightSource, task: Task) -> int:
    dtype = source.dtype(resolve_device(task.device), task.dtype)
    if not isinstance(dtype, torch.dtype):  # "auto": the dtype that they are stored in
        dtype = getattr(source.config, "dtype", None) or torch.float32
    return dtype.itemsize


def main() -> int:
    """Run the task on stdin and print its findings; return the exit code, 0."""
    with tokenizers_read_once():
        for check, (state, found, remedy) in findings(Task.read(sys.stdin.readline())):
            tell({"event": "found", "check": check, "state": state, "found": found, "remedy": remedy})
    return 0


if __name__ == "__main__":
    sys.exit(main())
