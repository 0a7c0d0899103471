"""`outrider up`: the whole system on this machine (or a Ray cluster) until Ctrl-C."""

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
from rich.text import Text
from typer.core import TyperCommand

from outrider.cli import options as opt
from outrider.cli.console import EXIT_FAILED, errors_as_lines, note_console, print_error, serving_console
from outrider.cli.progress import StartProgress
from outrider.cli.setting_options import with_settings
from outrider.cli.supervisor import Endpoints, PartFailed, Supervisor
from outrider.cli.vllm_flags import translated
from outrider.client.connect import KEY_VARIABLE
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.kinds import DRAFTERS, Drafter
from outrider.wire.processes import StopFlag, StopRequested, ignore_log_rotation
from outrider.wire.settings.api_keys import ApiKey as KeyEntry
from outrider.wire.settings.api_keys import digest_of, write_keys
from outrider.wire.settings.config import DefaultDrafter
from outrider.wire.settings.pools import Values
from outrider.wire.settings.system import DEMO_NAME, SystemConfig, merged, read_yaml

_ALARMING = re.compile(r' (WARNING|ERROR|CRITICAL) |"level": "(warning|error|critical)"|^scaling to ')
"""Finds, in either form of log, the lines shown without --verbose: faults, and pools that grow or shrink."""

Model = Annotated[
    str | None,
    typer.Argument(help="As --target; without a draft named beside it, it is served alone.", show_default=False),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with the parts' settings; flags win.")]
Target = Annotated[str | None, typer.Option(help="Folder or hub id of the target; absent = the demo pair.")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of the draft, a model or a head; or, without a model, ngram, lookup, "
        "unigram:TEXTFILE or bigram:TEXTFILE.",
        autocompletion=opt.completed_draft,
    ),
]
NoDraft = Annotated[
    bool,
    typer.Option("--no-draft", help="The target alone: plain decoding, or what it drafts itself (--drafter ngram)."),
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
    DefaultDrafter | None,
    typer.Option(
        "--drafter",
        help="Who drafts for requests that do not say; model unless set. It and those with +model need a draft worker.",
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
    """A command that takes vLLM's flags, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # as for a shell's completion
            with errors_as_lines():
                args, notes = translated(args)
            for note in notes:
                note_console().print(f"vLLM's {note}", style="dim")
        return list(super().parse_args(ctx, args))


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
    is --target-NAME or --draft-NAME (`python -m target_service --help`). vLLM's flags are taken, or say what is here.

    Exit code 0 after Ctrl-C, SIGTERM or SIGHUP, 1 when a part could not start or ended by itself. No process is left.
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
        file = read_yaml(config) if config is not None else {}
        names_no_draft = draft is None and "draft" not in file and not os.environ.get("OUTRIDER_DRAFT_MODEL")
        system_config = merged(
            file,
            flags,
            no_draft=no_draft or (model is not None and names_no_draft),
            no_ray=no_ray,
            certificates=tls_dir,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        ignore_log_rotation()
        stop = StopFlag()
        stop.install()
        with Supervisor(system_config, stop, log_to(console, verbose)) as system:
            with StartProgress(console) as progress:
                endpoints = system.start(progress, needs_drafts=draft is not None)
            show_ready(console, endpoints, system_config)
            system.watch()
            console.print(f"stopping; running answers have {system.drain_timeout_s:g} s to end (Ctrl-C again: at once)")


@contextmanager
def _key_file(keys: Sequence[str], gateway: Values) -> Iterator[None]:
    """Have the gateway ask for these keys, which are in a file, hashed, for as long as the block lasts."""
    if not keys:
        yield
        return
    if gateway.get("api_keys") is not None:
        raise ConfigError("--api-key and --api-keys contradict each other; put all keys into the file")
    with tempfile.TemporaryDirectory(prefix="outrider-keys-") as folder:
        path = Path(folder) / "keys.yaml"
        named = [KeyEntry(name=f"key-{index}", sha256=digest_of(key)) for index, key in enumerate(keys)]
        write_keys(path, tuple(named))
        gateway["api_keys"] = str(path)
        yield


def log_to(console: Console, verbose: bool) -> Any:
    """Return a function that shows a line of a part's log, or leaves it out."""

    def show(part: str, line: str) -> None:
        if verbose or _ALARMING.search(line):
            console.print(f"{part}: {line}", markup=False, style="dim" if verbose else None)

    return show


@contextmanager
def failures_as_lines(console: Console) -> Iterator[None]:
    """Show an error as one line with the end of its log, if any, and exit with 1; a requested stop is none."""
    try:
        yield
    except StopRequested:
        return
    except OutriderError as error:
        print_error(error.message, console)
        for line in error.log_lines if isinstance(error, PartFailed) else ():
            console.print(f"  {line}", markup=False, style="dim")
        raise typer.Exit(EXIT_FAILED) from None


def show_ready(console: Console, endpoints: Endpoints, settings: SystemConfig) -> None:
    tls_dir = None if settings.ray is None else settings.ray.tls_dir
    with_draft = any(one.role == "draft" for one in endpoints.workers)
    own = DRAFTERS[settings.gateway.get("drafter", Drafter.MODEL.label)].own
    no_draft = "; no draft: " + ("plain decoding" if own is None else f"the target drafts for itself by {own.label}")
    workers = ", ".join(f"{one.name} {one.address}" for one in endpoints.workers)
    console.print(Text.assemble("\n", ("ready", "bold green"), f"  {workers}{'' if with_draft else no_draft}"))
    for gateway in endpoints.gateways:
        console.print(f"  HTTP  {gateway.url}/v1   metrics {gateway.metrics_url}/metrics")
        console.print(f"  gRPC  {gateway.grpc}")
        if settings.gateway.get("page", True):
            console.print(f"  page  {gateway.url}/")
    for refused in dict.fromkeys(refused for gateway in endpoints.gateways for refused in gateway.refused):
        console.print(Text.assemble("  ", ("not used", "bold yellow"), f"  the {refused}"))
    for one in endpoints.workers:
        console.print(f"  {one.name} memory  {one.memory}", highlight=False)
        if one.metrics is not None:
            console.print(f"  {one.name} metrics  http://{one.metrics}/metrics")
    if endpoints.registry is not None:
        certificates = "" if tls_dir is None else f" --tls-dir {tls_dir}"
        console.print(
            f"  registry  {endpoints.registry}   (outrider scale --registry {endpoints.registry}{certificates})"
        )
    key, secured = bool(settings.gateway.get("api_keys")), bool(settings.gateway.get("public_tls_dir"))
    body = '{"prompt": "import os\\n\\ndef ", "max_tokens": 64, "temperature": 0}'
    header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if key else ""
    trusted = " --cacert CA.pem" if secured else ""
    url = f"{endpoints.gateways[0].url}/v1/completions"
    console.print(f"\n  curl {url}{trusted}{header} -H 'Content-Type: application/json' -d '{body}'", markup=False)
    trusted = " --tls-ca CA.pem" if secured else ""
    rounds = " -K 5" if with_draft or own is not None else ""
    console.print(f"  outrider generate 'import os'{rounds} --address {endpoints.grpc}{trusted}\n", markup=False)
    if rounds:
        often = ": often on the demo" if settings.gateway.get("model_name") == DEMO_NAME else ""
        console.print(f"-K 5 always drafts 5 tokens; without it K adapts, to none where drafts do not pay{often}.")
    if key:
        console.print(f"Both read an API key from {KEY_VARIABLE}.", markup=False)
    console.print("Ctrl-C stops everything.")
