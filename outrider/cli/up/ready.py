"""Prints what `outrider up` shows once the system serves: addresses, the workers' memory, and a first call to copy."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from outrider.cli.up.endpoints import Endpoints
from outrider.client.address import GRPC_PORT
from outrider.client.connect import KEY_VARIABLE
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.speculation import AUTO
from outrider.wire.settings.system import DEMO_NAME, SystemConfig


def show_ready(console: Console, endpoints: Endpoints, settings: SystemConfig) -> None:
    """Print the addresses of a system that now serves, its workers' memory, and an example request."""
    own = Drafter(settings.gateway.get("drafter", Drafter.AUTO)).own
    with_draft = any(worker.role == "draft" for worker in endpoints.workers)
    workers = ", ".join(f"{worker.name} {worker.address}" for worker in endpoints.workers)
    drafter = ""
    if not with_draft:
        drafter = _without_draft(own)
    console.print(Text.assemble("\n", ("ready", "bold green"), f"  {workers}{drafter}"))
    _show_addresses(console, endpoints, settings)
    _show_example(console, endpoints, settings, has_drafts=with_draft or own is not None)
    console.print("Ctrl-C stops everything.")


def _without_draft(own: Drafter | None) -> str:
    if own is None:
        return "; no draft: plain decoding; --drafter auto would draft without a model"
    text = "; no draft: the target drafts for itself"
    if own is not Drafter.AUTO:
        text += f" by {own}"
    return text


def _show_addresses(console: Console, endpoints: Endpoints, settings: SystemConfig) -> None:
    for gateway in endpoints.gateways:
        console.print(f"  HTTP  {gateway.url}/v1   metrics {gateway.metrics_url}/metrics")
        console.print(f"  gRPC  {gateway.grpc}")
        if settings.gateway.get("page", True):
            console.print(f"  page  {gateway.url}/")
    all_refused = dict[str, None]()  # several gateways refuse the same
    for gateway in endpoints.gateways:
        all_refused.update(dict.fromkeys(gateway.refused))
    for refused in all_refused:
        console.print(Text.assemble("  ", ("not used", "bold yellow"), f"  the {refused}"))
    for worker in endpoints.workers:
        console.print(f"  {worker.name} memory  {worker.memory}", highlight=False)
        if worker.metrics is not None:
            console.print(f"  {worker.name} metrics  http://{worker.metrics}/metrics")
    if endpoints.registry is not None:
        certificates = ""
        if settings.ray is not None and settings.ray.tls_dir is not None:
            certificates = f" --tls-dir {settings.ray.tls_dir}"
        console.print(
            f"  registry  {endpoints.registry}   (outrider scale --registry {endpoints.registry}{certificates})"
        )


def _show_example(console: Console, endpoints: Endpoints, settings: SystemConfig, *, has_drafts: bool) -> None:
    """Print example commands that work as they are, except that an API key and a CA may have to be filled in."""
    has_key = bool(settings.gateway.get("api_keys"))
    is_secured = bool(settings.gateway.get("public_tls_dir"))
    adapts = has_drafts and _adapts(settings.gateway)
    url, body = _first_call(endpoints)
    curl = f"curl {url}"
    command = f"outrider generate {shlex.quote('import os')}"
    if endpoints.chats:
        command = "outrider chat"
    if adapts:
        command += " -K 5"
    if endpoints.grpc != f"127.0.0.1:{GRPC_PORT}":
        command += f" --address {endpoints.grpc}"
    if is_secured:
        curl += " --cacert CA.pem"
        command += " --tls-ca CA.pem"
    if has_key:
        curl += f' -H "Authorization: Bearer ${KEY_VARIABLE}"'
    console.print(f"\n  {curl} -H 'Content-Type: application/json' -d '{body}'", markup=False)
    console.print(f"  {command}\n", markup=False)
    if adapts:
        often = ""
        if settings.gateway.get("model_name") == DEMO_NAME:
            often = ": often on the demo"
        console.print(f"-K 5 always drafts 5 tokens; without it K adapts, to none where drafts do not pay{often}.")
    if has_key:
        console.print(f"Both read an API key from {KEY_VARIABLE}.", markup=False)


def _adapts(gateway: Mapping[str, object]) -> bool:
    num_draft_tokens = gateway.get("num_draft_tokens")
    return gateway.get("tree") is None and num_draft_tokens in (None, AUTO)


def _first_call(endpoints: Endpoints) -> tuple[str, str]:
    """Return (URL, body) of an example call. It is a chat if the model is made for chats."""
    base = f"{endpoints.gateways[0].url}/v1"
    if endpoints.chats:
        return f"{base}/chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}'
    return f"{base}/completions", '{"prompt": "import os\\n\\ndef ", "max_tokens": 64, "temperature": 0}'
