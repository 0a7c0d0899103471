"""Check the devices of this machine and the files of a target and its drafts, before any worker is started.

`doctor` runs it as `python -m outrider.engine.checkup` with a `CheckTask` in JSON on stdin; it prints a JSON object for
each finding. `model_check` checks the files.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from outrider.engine import memory
from outrider.engine.attention.varlen_attention import torch_refusal
from outrider.engine.files.tokenizer_files import tokenizers_read_once
from outrider.engine.loading.loader import resolve_device
from outrider.engine.memory import readable_bytes
from outrider.engine.model_check import CheckTask, Find, Footprint, check_draft, read_model
from outrider.engine.native.build import BuildError, check_writable, library_path
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import local_path
from outrider.wire.processes.processes import write_event
from outrider.wire.settings.gpu_shares import needed_bytes, share_of, utilization_of

GPU_DEVICE = Path("/dev/nvidiactl")
"""Device file that exists if an NVIDIA driver is loaded."""


def findings(
    task: CheckTask, tell_files: Callable[[pb.TokenizerFiles], None] | None = None
) -> Iterator[tuple[str, Find]]:
    """Run all checks of `outrider doctor`: of the machine, the target's files, each draft's files, and the memory.
    Yield the name of each check and its result: its state, what was found, and the remedy.

    tell_files: function that is called with the target's tokenizer and chat-template files, if they can be read.
    """
    yield "GPU", check_gpu()
    yield "C++ forward", check_native()
    has_device = True
    try:
        resolve_device(task.device)
    except ConfigError as error:
        has_device = False
        task = replace(task, device="cpu")
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
    if tell_files is not None:
        tell_files(target.files)
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
        yield "memory", check_memory([target.footprint], task.device)
    for draft, footprint in footprints.items():
        check = "memory" if len(footprints) == 1 else f"memory with {draft}"
        yield check, check_memory([target.footprint, footprint], task.device)


def _refusal(error: ConfigError, model: str) -> Find:
    try:
        is_hub_id = local_path(model) is None
    except ConfigError:
        is_hub_id = False
    remedy = ""
    if is_hub_id:
        remedy = f"a hub id is read once it is here: outrider pull {model}"
    return "problem", error.message, remedy


def check_gpu() -> Find:
    """Check whether torch can use the machine's GPUs, and whether this torch has flash attention for them."""
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


def check_native() -> Find:
    """Return the result of the check whether Outrider's C++ library, which speeds up CPU models and sampling, is
    compiled already, or can be compiled when the first worker starts.
    """
    try:
        path, compiler = library_path()
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


def check_memory(models: list[Footprint], device_name: str) -> Find:
    """Return the result of the check whether the weights of all models and, for each model, a KV cache for one context
    of full length fit into the free memory of the device.
    """
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


def _write_templates(files: pb.TokenizerFiles) -> None:
    """Write an event with the target's chat templates: `gateway.tools.template_check` says how they are read."""
    configured = json.loads(files.tokenizer_config_json or b"{}").get("chat_template")
    additional = {name: data.decode(errors="replace") for name, data in files.additional_chat_templates.items()}
    file = files.chat_template.decode(errors="replace")
    write_event({"event": "templates", "file": file, "configured": configured, "additional": additional})


def main() -> int:
    """Run the checks of the `CheckTask` that is on stdin and print each result to stdout. Return the exit code, 0."""
    with tokenizers_read_once():
        for check, (state, found, remedy) in findings(CheckTask.read(sys.stdin.readline()), _write_templates):
            write_event({"event": "found", "check": check, "state": state, "found": found, "remedy": remedy})
    return 0


if __name__ == "__main__":
    sys.exit(main())
