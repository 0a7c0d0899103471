"""`outrider up`: runs the whole system on this machine, or a Ray cluster, until Ctrl-C."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from outrider.cli import options as opt
from outrider.cli.console import EXIT_FAILED, errors_as_lines, note_console, print_error, serving_console
from outrider.cli.progress import StartProgress
from outrider.cli.up.ready import show_ready
from outrider.cli.up.setting_options import with_settings
from outrider.cli.up.supervisor import ProcessFailed, Supervisor
from outrider.cli.up.vllm_flags import similar_flags, translated
from outrider.client.connect import KEY_VARIABLE
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.processes.stop_flag import StopFlag, StopRequested, ignore_log_rotation
from outrider.wire.requests.drafters import Drafter
from outrider.wire.settings.api_keys import ApiKey as KeyEntry
from outrider.wire.settings.api_keys import digest_of, write_keys
from outrider.wire.settings.pools import Values
from outrider.wire.settings.system import merge_settings, read_yaml

_ALARMING = re.compile(r' (WARNING|ERROR|CRITICAL) |"level": "(warning|error|critical)"|^scaling to | is back\b')
"""Matches the log lines (text or JSON) that are shown even without --verbose: faults, workers that are back after a
fault, and pools that grow or shrink."""

Model = Annotated[
    str | None,
    typer.Argument(help="As --target; without a draft named beside it, it is served alone.", show_default=False),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with the parts' settings; flags win.")]
Target = Annotated[str | None, typer.Option(help="Folder, GGUF file or hub id of the target; absent = the demo pair.")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Folder, GGUF file or hub id of the draft, a model or a head; or, without a model, ngram, lookup, "
        "unigram:TEXTFILE or bigram:TEXTFILE.",
        autocompletion=opt.completed_draft,
    ),
]
NoDraft = Annotated[
    bool,
    typer.Option("--no-draft", help="The target alone: it drafts for itself (--drafter)."),
]
Host = Annotated[str | None, typer.Option(help="Address that HTTP and gRPC listen on; 127.0.0.1 unless set.")]
HttpPort = Annotated[int | None, typer.Option("--port", help="HTTP port; 8000 unless set; 0 = a free one.")]
GrpcPort = Annotated[
    int | None, typer.Option(help="gRPC port; the next free one after --port, or 8001, unless set; 0 = a free one.")
]
K = Annotated[
    str | None,
    typer.Option(
        "--num-draft-tokens",
        "-K",
        metavar="N|auto",
        help="Tokens drafted a round; auto, as many as pay, unless set.",
    ),
]
DrafterOption = Annotated[
    Drafter | None,
    typer.Option(
        "--drafter",
        help="What proposes draft tokens, unless the request gives it; auto unless set. Model needs a draft worker.",
    ),
]
Tree = Annotated[
    str | None,
    typer.Option(help="Draft trees: children by depth, 4x2x1, or best:12x4, nodes and depth; chains unless set."),
]
ModelName = Annotated[
    str | None, typer.Option(help="Id under which the pair is served; the target's folder unless set.")
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        help="A key that every request must have; may be given several times. Better in a file: --api-keys.",
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory-utilization", help="Share of each GPU that its workers take together; 0.9 where they share one."
    ),
]
Mtp = Annotated[bool, typer.Option("--mtp", help="The draft is the MTP head in the target's own checkpoint.")]
NoRay = Annotated[bool, typer.Option("--no-ray", help="Plain processes; nothing restarts a worker then.")]
RayAddress = Annotated[
    str | None, typer.Option(help="A running Ray cluster as host:port of its head, or auto; absent = one of our own.")
]
TlsDir = Annotated[
    Path | None,
    typer.Option(help="Folder of `outrider certs`: mutual TLS between all parts. Users: gateway.public_tls_dir."),
]


class VllmCommand(TyperCommand):
    """A typer command that also accepts vLLM's flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate vLLM's flags, print notes on them, and parse the command line."""
        if not ctx.resilient_parsing:  # as for a shell's completion
            with errors_as_lines():
                args, notes = translated(args)
            for note in notes:
                note_console().print(f"vLLM's {note}", style="dim")
        try:
            return list(super().parse_args(ctx, args))
        except Exception as error:
            if hasattr(error, "option_name") and hasattr(error, "possibilities"):  # a flag that is not known
                our_flags = list[str]()
                for param in self.params:
                    our_flags += param.opts
                error.possibilities = similar_flags(error.option_name, our_flags)
            raise


@with_settings
@opt.grouped
def up(
    model: Model = None,
    *,
    config: ConfigFile = None,
    target: Target = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    placement: opt.PlacementOptions,
    host: Host = None,
    port: HttpPort = None,
    grpc_port: GrpcPort = None,
    num_draft_tokens: K = None,
    drafter: DrafterOption = None,
    tree: Tree = None,
    model_name: ModelName = None,
    no_ray: NoRay = False,
    ray_address: RayAddress = None,
    tls_dir: TlsDir = None,
    api_key: ApiKey = None,
    gpu_memory_utilization: GpuMemory = None,
    mtp: Mtp = False,
    verbose: opt.Verbose = False,
    settings: Mapping[str, Values],
) -> None:
    """Start workers and gateways; serve until Ctrl-C.

    A draft, a target and a gateway, unless --config names pools of several (docs/cluster.md). Any setting of a worker
    is --target-NAME or --draft-NAME (`python -m target_service --help`). vLLM's flags are translated or explained.

    Exit code 0 after Ctrl-C, SIGTERM or SIGHUP; 1 if a part could not start or ended by itself. No process is left.
    """
    if model is not None and target is not None:
        raise typer.BadParameter(f"is {target!r}, and {model!r} stands before it; name one", param_hint="--target")
    target = model or target
    if mtp:
        draft = target
    workers = placement.workers(target, draft)
    flags: Values = {
        "target": {**settings["target"], **workers["target"]},
        "draft": {**settings["draft"], **workers["draft"]},
        "gateway": {
            **settings["gateway"],
            "host": host,
            "port": port,
            "grpc_port": grpc_port,
            "num_draft_tokens": num_draft_tokens,
            "drafter": drafter,
            "tree": tree,
            "model_name": model_name,
        },
        "ray": {"address": ray_address},
    }
    console = serving_console()
    with failures_as_lines(console), _key_file(api_key or (), flags["gateway"]):
        file: Values = {}
        if config is not None:
            file = read_yaml(config)
        system_config = merge_settings(
            file,
            flags,
            no_draft=no_draft or (model is not None and draft is None and not _names_draft(file)),
            no_ray=no_ray,
            certificates=tls_dir,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        ignore_log_rotation()
        stop = StopFlag()
        stop.install()
        key = os.environ.get(KEY_VARIABLE)
        if api_key:
            key = api_key[0]
        with Supervisor(system_config, stop, log_to(console, verbose, stop), api_key=key) as system:
            with StartProgress(console) as progress:
                endpoints = system.start(progress, needs_drafts=draft is not None)
            show_ready(console, endpoints, system_config)
            system.watch()
            console.print(f"stopping; running answers have {system.drain_timeout_s:g} s to end (Ctrl-C again: at once)")


def _names_draft(file: Values) -> bool:
    """Return whether the file or the environment names a draft, or whether the file names pools."""
    if {"draft", "drafts", "targets"} & set(file):
        return True
    return bool(os.environ.get("OUTRIDER_DRAFT_MODEL") or os.environ.get("OUTRIDER_DRAFT_DRAFTER"))


@contextmanager
def _key_file(keys: Sequence[str], gateway: Values) -> Iterator[None]:
    """Context manager: write the hashes of API keys into a file, and set that file as the gateway's `api_keys`, during
    the block.
    """
    if not keys:
        yield
        return
    if "" in keys:
        raise ConfigError("--api-key is empty, and would let everybody in; give a key, or leave it out")
    if gateway.get("api_keys") is not None:
        raise ConfigError("--api-key and --api-keys contradict each other; put all keys into the file")
    with tempfile.TemporaryDirectory(prefix="outrider-keys-") as folder:
        path = Path(folder) / "keys.yaml"
        entries = [KeyEntry(name=f"key-{index}", sha256=digest_of(key)) for index, key in enumerate(keys)]
        write_keys(path, tuple(entries))
        gateway["api_keys"] = str(path)
        yield


def log_to(console: Console, verbose: bool, stop: StopFlag) -> Any:
    """Return a function that prints one line of a part's log. Its arguments are the part's name and the line.

    verbose: whether all lines are printed. False = only faults, workers that are back after a fault, and pools that
    grow or shrink. After a stop was requested even these are not printed, because parts then report each other's end as
    a fault.
    """
    style = None
    if verbose:
        style = "dim"

    def show(part: str, line: str) -> None:
        if verbose or (_ALARMING.search(line) and not stop.is_set()):
            console.print(f"{part}: {line}", markup=False, style=style)

    return show


@contextmanager
def failures_as_lines(console: Console) -> Iterator[None]:
    """Context manager: if the block raises an OutriderError, print its message, with the last lines of the failed
    part's log, and exit with code 1. A requested stop is not an error.
    """
    try:
        yield
    except StopRequested:
        return
    except OutriderError as error:
        print_error(error.message, console)
        if isinstance(error, ProcessFailed):
            for line in error.log_lines:
                console.print(f"  {line}", markup=False, style="dim")
        raise typer.Exit(EXIT_FAILED) from None
