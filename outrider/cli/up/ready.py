"""What `outrider up` says once it serves: where, what each worker takes, and a first call to copy."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from outrider.cli.up.supervisor import Endpoints
from outrider.client.address import GRPC_PORT
from outrider.client.connect import KEY_VARIABLE
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.speculation import AUTO
from outrider.wire.settings.system import DEMO_NAME, SystemConfig


def show_ready(console: Console, endpoints: Endpoints, settings: SystemConfig) -> None:
    """Print it."""
    own = Drafter(settings.gateway.get("drafter", Drafter.AUTO)).own
    with_draft = any(one.role == "draft" for one in endpoints.workers)
    workers = ", ".join(f"{one.name} {one.address}" for one in endpoints.workers)
    drafter = "" if with_draft else _without_draft(own)
    console.print(Text.assemble("\n", ("ready", "bold green"), f"  {workers}{drafter}"))
    _show_addresses(console, endpoints, settings)
    _show_example(console, endpoints, settings, has_drafts=with_draft or own is not None)
    console.print("Ctrl-C stops everything.")


def _without_draft(own: Drafter | None) -> str:
    if own is None:
        return "; no draft: plain decoding; --drafter auto would draft without a model"
    by = "" if own is Drafter.AUTO else f" by {own}"
    return f"; no draft: the target drafts for itself{by}"


def _show_addresses(console: Console, endpoints: Endpoints, settings: SystemConfig) -> None:
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
        tls_dir = None if settings.ray is None else settings.ray.tls_dir
        certificates = "" if tls_dir is None else f" --tls-dir {tls_dir}"
        console.print(
            f"  registry  {endpoints.registry}   (outrider scale --registry {endpoints.registry}{certificates})"
        )


def _show_example(console: Console, endpoints: Endpoints, settings: SystemConfig, *, has_drafts: bool) -> None:
    """Print commands that work as they are, but for the key and the CA: a chat with a model that is made for it."""
    has_key, is_secured = bool(settings.gateway.get("api_keys")), bool(settings.gateway.get("public_tls_dir"))
    header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    trusted = " --cacert CA.pem" if is_secured else ""
    url, body = _first_call(endpoints)
    console.print(f"\n  curl {url}{trusted}{header} -H 'Content-Type: application/json' -d '{body}'", markup=False)
    trusted = " --tls-ca CA.pem" if is_secured else ""
    adapts = has_drafts and _adapts(settings.gateway)
    rounds = " -K 5" if adapts else ""
    command = "chat" if endpoints.chats else f"generate {shlex.quote('import os')}"
    address = "" if endpoints.grpc == f"127.0.0.1:{GRPC_PORT}" else f" --address {endpoints.grpc}"
    console.print(f"  outrider {command}{rounds}{address}{trusted}\n", markup=False)
    if adapts:
        often = ": often on the demo" if settings.gateway.get("model_name") == DEMO_NAME else ""
        console.print(f"-K 5 always drafts 5 tokens; without it K adapts, to none where drafts do not pay{often}.")
    if has_key:
        console.print(f"Both read an API key from {KEY_VARIABLE}.", markup=False)


def _adapts(gateway: Mapping[str, object]) -> bool:
    """Return whether K adapts where a request names none, by the gateway's settings."""
    num_draft_tokens = gateway.get("num_draft_tokens")
    return gateway.get("tree") is None and num_draft_tokens in (None, AUTO)


def _first_call(endpoints: Endpoints) -> tuple[str, str]:
    """Return URL and body."""
    base = f"{endpoints.gateways[0].url}/v1"
    if endpoints.chats:
        return f"{base}/chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}'
    return f"{base}/completions", '{"prompt": "import os\\n\\ndef ", "max_tokens": 64, "temperature": 0}'
