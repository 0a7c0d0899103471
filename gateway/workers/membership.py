"""Pools and their members, read from the command line or from the launcher's registry. Plain values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from outrider.v1 import registry_pb2 as rpb
from outrider.wire.errors import ConfigError
from outrider.wire.peer_text import MAX_REASON_BYTES, bound_text
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.address import is_host_port

log = get_logger(__name__)

Role = Literal["target", "draft"]
_ROLES: dict[int, Role] = {rpb.ROLE_TARGET: "target", rpb.ROLE_DRAFT: "draft"}
TARGETS = "target"
DRAFTS = "draft"
"""TARGETS and DRAFTS are the names of the target pool and the draft pool if the command line lists workers without
naming pools."""
DNS = "dns:///"
"""Prefix of a host:port on the command line. Each IP address of the host is then one worker."""
_POOL_NAME = re.compile(r"[^=,;:\s]+")


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Specification of a pool of workers: its name, role and model."""

    name: str
    role: Role
    """Role of the pool's workers: target or draft."""
    model_name: str | None = None
    """Model id that requests use for a target pool; None for the id that the model's path gives."""
    serves: tuple[str, ...] = ()
    """Names of the target pools for which a draft pool drafts; empty for a target pool."""


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """Specification of a worker: its name, pool, role and addresses."""

    name: str
    pool: str
    role: Role
    address: str
    """Address of the worker's service as host:port; empty while the worker is being started."""
    deliver_address: str = ""
    """Address to which draft workers send draft tokens, as host:port. Only used for a target."""
    is_starting: bool = False
    """Whether the worker is being started. The gateway cannot connect to it yet."""
    is_draining: bool = False
    """Whether the worker only finishes what it runs and takes no new choices."""
    metrics_address: str = ""
    """Address of the worker's metrics as host:port, empty if unknown."""
    node: str = ""
    """Host on which the launcher has placed the worker, empty if unknown."""
    why: str = ""
    """Reason why the launcher does not start the worker again; empty if it does, or if the reason is unknown."""


@dataclass(frozen=True, slots=True)
class Membership:
    """All pools and members of a gateway at one time."""

    pools: tuple[PoolSpec, ...]
    members: tuple[MemberSpec, ...]


def from_config(config: GatewayConfig) -> Membership:
    """Return the pools and workers that the settings `target`, `draft` and `target_for_draft` list.

    Raises ConfigError if they do not fit together.
    """
    pool, of_target = _pool_name("target", config.target or "")
    pool = pool or TARGETS
    targets = _addresses("target", of_target)
    drafts = _draft_pools(config.draft)
    if pool in drafts:
        raise ConfigError(f"target and draft both have a pool {pool!r}; give them different names", param="target")
    draft_members = list[MemberSpec]()
    for members_of_pool in drafts.values():
        draft_members += members_of_pool
    draft_addresses = {member.address for member in draft_members}
    if len(draft_addresses) < len(draft_members):
        raise ConfigError(f"draft is {config.draft!r}, which names a worker twice", param="draft")
    if config.drafter.needs_pools and len(drafts) < 2:
        log.warning("drafter is %s, and draft is %r: it takes two pools, as in A;B", config.drafter, config.draft)
    deliver = _addresses("target_for_draft", config.target_for_draft) or targets
    if len(deliver) != len(targets):
        raise ConfigError(
            f"target_for_draft has {len(deliver)} addresses and target has {len(targets)}; give one for each, in order",
            param="target_for_draft",
        )
    if config.target_for_draft is not None:
        for address in targets:
            if address.startswith(DNS):
                raise ConfigError(
                    f"target_for_draft is given and target has {address!r}, whose addresses drafts are sent; leave one "
                    "out",
                    param="target_for_draft",
                )
    pools = [PoolSpec(pool, "target", config.model_name)]
    for name in drafts:
        pools.append(PoolSpec(name, "draft", serves=(pool,)))
    target_members = list[MemberSpec]()
    for index, (address, deliver_address) in enumerate(zip(targets, deliver, strict=True)):
        target_members.append(MemberSpec(f"target-{index}", pool, "target", address, deliver_address))
    return Membership(tuple(pools), (*target_members, *draft_members))


def from_proto(message: rpb.WorkerList) -> Membership:
    """Convert a registry's Membership message. Pools and members of a role unknown to this version are left out."""
    pools = list[PoolSpec]()
    for pool in message.pools:
        if pool.role in _ROLES:
            pools.append(PoolSpec(pool.name, _ROLES[pool.role], pool.model_name or None, tuple(pool.serves)))
    members = list[MemberSpec]()
    for member in message.workers:
        if member.role in _ROLES:
            members.append(_member_from_proto(member, _ROLES[member.role]))
    return Membership(tuple(pools), tuple(members))


def _member_from_proto(message: rpb.Worker, role: Role) -> MemberSpec:
    is_draining = message.state == rpb.WORKER_STATE_DRAINING
    is_started = is_draining or message.state == rpb.WORKER_STATE_SERVING
    return MemberSpec(
        message.name,
        message.pool,
        role,
        message.address,
        message.address,
        is_starting=not message.address or not is_started,
        is_draining=is_draining,
        metrics_address=message.metrics_address,
        node=message.node,
        why=bound_text(message.reason, MAX_REASON_BYTES),
    )


def _draft_pools(text: str | None) -> dict[str, list[MemberSpec]]:
    """Members without a pool's name are numbered over all pools, others within their pool.

    # "a:1;b:1" -> draft: draft-0, draft-2: draft-1
    # "y=a:1;b:1" -> y: draft-y-0, draft-2: draft-1
    """
    if text is None:
        return {}
    pools: dict[str, list[MemberSpec]] = {}
    num_members = 0
    for number, part in enumerate(text.split(";"), start=1):
        if not part.strip():
            raise ConfigError(f"draft is {text!r}, which has an empty pool; write host:port;host:port", param="draft")
        given, addresses = _pool_name("draft", part)
        name = given or DRAFTS
        if not given and number > 1:
            name = f"{DRAFTS}-{number}"
        if name in pools:
            raise ConfigError(f"draft is {text!r}, with two pools called {name}; give each its name", param="draft")
        prefix = DRAFTS
        first_index = num_members
        if given:
            first_index = 0
            if given != DRAFTS:
                prefix = f"{DRAFTS}-{given}"
        members = list[MemberSpec]()
        for index, address in enumerate(_addresses("draft", addresses), start=first_index):
            members.append(MemberSpec(f"{prefix}-{index}", name, "draft", address))
        pools[name] = members
        num_members += len(members)
    return pools


def _pool_name(name: str, text: str) -> tuple[str, str]:
    given, equals, addresses = text.rpartition("=")
    if equals and not _POOL_NAME.fullmatch(given.strip()):
        form = "POOL=host:port,host:port, one pool"
        if name == "draft":
            form = "POOL=host:port,host:port;POOL=host:port"
        raise ConfigError(f"{name} has the pool {given.strip()!r}; write {form}", param=name)
    return given.strip(), addresses


def _addresses(name: str, text: str | None) -> list[str]:
    if text is None:
        return []
    addresses = [part.strip() for part in text.split(",")]
    if not all(addresses):
        raise ConfigError(f"{name} is {text!r}, which has an empty address; write host:port,host:port", param=name)
    for address in addresses:
        if not is_host_port(address.removeprefix(DNS)):
            raise ConfigError(f"{name} has the address {address!r}, must be host:port", param=name)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"{name} is {text!r}, which names a worker twice", param=name)
    return addresses
