"""Say what torch, this machine's devices and a pair's files have to say before anything is started. For `doctor`.

Runs as `python -m outrider.engine.checkup` with a `Task` in JSON on stdin; prints a JSON object for each finding. Of
models only configurations, tokenizers and names of tensors are read, of heads the tensors, too: their shapes say whose
they are.
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
"""Where a driver is loaded."""
Find = tuple[Literal["ok", "warning", "problem"], str, str]
"""State, what was found, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Task:
    target: str | None
    """Folder or hub id; None where no pair is to be looked at."""
    drafts: list[str]
    device: str
    """As in the workers' settings."""
    dtype: str

    @classmethod
    def read(cls, line: str) -> Self:
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a model or a head takes."""

    weights_bytes: int
    """In the dtype that it would be loaded in."""
    kv_bytes: int
    """About, of a context of full length."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's or encoder-decoder's files."""

    info: pb.WorkerInfo
    """As its worker would say it."""
    tokenizer_json: bytes
    footprint: Footprint
    class_name: str
    notes: tuple[str, ...] = ()
    """What its files say that may surprise, a sentence each."""

    def __str__(self) -> str:
        info = self.info
        footprint = self.footprint
        part = ", text only" if info.text_only else ""
        return (
            f"{self.class_name}{part}, context {info.context_limit}, vocabulary {info.vocab_size}, weights "
            f"{readable_bytes(footprint.weights_bytes)}, KV cache about {readable_bytes(footprint.kv_bytes)} a full "
            "context"
        )


def findings(task: Task) -> Iterator[tuple[str, Find]]:
    """Yield what is checked and what was found."""
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
        yield "target", _refused(error, task.target)
        rest = [*(f"draft {draft}" for draft in task.drafts), "memory"]
        yield "skipped", ("warning", f"{', '.join(rest)}, for which the target is needed", "")
        return
    yield "target", ("ok", str(target), "")
    if target.notes:
        yield "files of the target", ("warning", "; ".join(target.notes), "")
    footprints = dict[str, Footprint]()
    for draft in task.drafts:
        try:
            footprints[draft], notes, find = check_draft(draft, target, task)
        except ConfigError as error:
            yield f"draft {draft}", _refused(error, draft)
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


def _refused(error: ConfigError, model: str) -> Find:
    try:
        is_hub_id = local_path(model) is None
    except ConfigError:
        is_hub_id = False
    return "problem", error.message, f"a hub id is read once it is here: outrider pull {model}" if is_hub_id else ""


def gpu() -> Find:
    """Whether torch reaches the GPUs that the machine has."""
    has_device = GPU_DEVICE.exists() or shutil.which("nvidia-smi") is not None
    with warnings.catch_warnings(record=True) as said:  # a driver that is too old is told in one
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        found = f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
        refusal = torch_refusal(torch.__version__)
        if refusal is None:
            return "ok", found, ""
        return "warning", f"{found}; no path flash, and so no CUDA graphs: {refusal}", "pip install 'torch>=2.13'"
    if not has_device:
        return "ok", "none; workers run on the CPU", ""
    if torch.version.cuda is None:
        install = "pip install --force-reinstall torch, with the --index-url of PyTorch's builds for CUDA"
        return "problem", f"the machine has one, and torch {torch.__version__} was built for CPUs", install
    why = str(said[0].message).splitlines()[0] if said else "torch finds no device"
    remedy = f"install a driver for CUDA {torch.version.cuda} or later, or let the container see the devices"
    return "problem", f"the machine has one, and torch {torch.__version__} does not reach it: {why}", remedy


def native() -> Find:
    """Whether the C++ forward is there, or can be made."""
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
    """Check what can be told without weights. Raises ConfigError as the worker's loader does."""
    path = local_path(model)
    if path is not None and path.is_dir():
        check_folder(path)
    config = read_config(model)
    check_class(config)
    text = config.get_text_config(decoder=True)
    tokenizer = read_tokenizer(model)
    files = tokenizer.files
    ends, start = read_ends(model, config), decoder_start_of(config, read_generation(model, config))
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
    num_parameters = sum(each.numel() for each in network.parameters())  # tied ones count once
    if path is not None and method_of(source.config) is not None:  # loaded as it is stored
        weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    else:
        weights = num_parameters * itemsize
    beyond = tokens_beyond(tokenizer.tokenizer, text.vocab_size)
    notes = tuple(note for note in (ends.difference, beyond) if note is not None)
    footprint = Footprint(weights, token_width(config) * itemsize * limit)
    return Model(info, files.tokenizer_json, footprint, type(network).__name__, notes)


def check_draft(draft: str, target: Model, task: Task) -> tuple[Footprint, tuple[str, ...], Find]:
    """Return what a draft takes, as in `Model.notes` what its files say, and how it serves the target.

    Raises ConfigError where it may not.
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
    return model.footprint, model.notes, _tokens(model, target)


def _head_footprint(family: Family, head: HeadFiles, context_limit: int, task: Task) -> Footprint:
    """Return what a head takes, with the projection that the target runs for it."""
    assert family.network is not None, "a head has a network"
    network = family.network.of(head.facts, head.tensors)
    itemsize = dtype_of(head.tensors, resolve_device(task.device), task.dtype).itemsize
    weights = sum(each.numel() for each in network.parameters()) * itemsize + head.opening.num_bytes
    kv_bytes = token_width(network.config) * itemsize * context_limit if family.paths else 0
    return Footprint(weights, kv_bytes)


def _tokens(draft: Model, target: Model) -> Find:
    """What the pair has in common. Raises ConfigError where that is nothing."""
    sizes = (target.info.vocab_size, draft.info.vocab_size)
    between_them = None
    if not has_same_tokens(draft.info, target.info):
        between_them = between(target.tokenizer_json, draft.tokenizer_json, *sizes, draft.info.eos_token_ids)
    if isinstance(between_them, Intersection):
        found = (
            f"{draft}; another tokenizer, works by translation: {between_them.num_shared} of the smaller vocabulary's "
            f"{between_them.num_texts} tokens ({between_them.share:.0%}) are one in both"
        )
    else:
        found = f"{draft}; the target's tokens"
    if draft.info.context_limit < target.info.context_limit:
        shorter = f"no drafts past token {draft.info.context_limit}, and answers may have {target.info.context_limit}"
        return "warning", f"{found}; {shorter}", "fine for short answers; else a draft with a longer context"
    return "ok", found, ""


def room(models: list[Footprint], device_name: str) -> Find:
    """Whether the weights of all models and a context of each have room in what is free on the device."""
    device = resolve_device(device_name)
    free = memory.free_memory_bytes(device)
    weights, caches = sum(each.weights_bytes for each in models), sum(each.kv_bytes for each in models)
    found = (
        f"{readable_bytes(weights)} of weights, {readable_bytes(caches)} for a full context of each model; "
        f"{readable_bytes(free)} free on {device}"
    )
    if device.type == "cuda" and len(models) > 1:
        found, is_too_small = _shared(found, models, device)
        if is_too_small:
            return "problem", found, "set gpu_memory_utilization for each, or give each a GPU of its own"
    if weights > free:
        quantized = "int8 (quantization)" if device.type == "cpu" else "a quantised checkpoint"
        return "problem", found, f"free some, or take --dtype bfloat16, {quantized} or a smaller model"
    if weights + caches > free:
        return "warning", found, "long requests will be refused: free some, or set context_limit"
    return "ok", found, ""


def _shared(found: str, models: list[Footprint], device: torch.device) -> tuple[str, bool]:
    """Add what each model's worker would have of one GPU for all; return also whether that is too little for one."""
    total = torch.cuda.mem_get_info(device)[1]
    needed = sum(needed_bytes(each.weights_bytes) for each in models)
    parts = list[str]()
    is_too_small = False
    for model in models:
        value = utilization_of(share_of(needed_bytes(model.weights_bytes), needed))
        parts.append(f"{readable_bytes(int(value * total))} ({value:g})")
        is_too_small = is_too_small or model.weights_bytes > value * total
    return f"{found}; on one GPU they share it, gpu_memory_utilization in order: {', '.join(parts)}", is_too_small


def _itemsize(source: WeightSource, task: Task) -> int:
    dtype = source.dtype(resolve_device(task.device), task.dtype)
    if not isinstance(dtype, torch.dtype):  # as they are stored
        dtype = getattr(source.config, "dtype", None) or torch.float32
    return dtype.itemsize


def main() -> int:
    with tokenizers_read_once():
        for check, (state, found, remedy) in findings(Task.read(sys.stdin.readline())):
            tell({"event": "found", "check": check, "state": state, "found": found, "remedy": remedy})
    return 0


if __name__ == "__main__":
    sys.exit(main())
