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
TARGETS, DRAFTS = "target", "draft"
"""Names of pools on a command line that gives them none."""
DNS = "dns:///"
"""Prefix of host:port where each address of the host is a worker."""
_POOL_NAME = re.compile(r"[^=,;:\s]+")


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Specification of a pool of workers."""

    name: str
    role: Role
    model_name: str | None = None
    """Id under which a target pool is served; None for the model's own."""
    serves: tuple[str, ...] = ()
    """Target pools for which a draft pool drafts."""


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """Specification of a worker."""

    name: str
    pool: str
    role: Role
    address: str
    """Address as host:port, empty while the worker is being started."""
    deliver_address: str = ""
    """Address at which drafts reach a target."""
    starting: bool = False
    draining: bool = False
    metrics_address: str = ""
    node: str = ""
    why: str = ""
    """Reason why the worker does not start again; empty if that is unknown or there is no fault."""


@dataclass(frozen=True, slots=True)
class Membership:
    """All pools and members of a gateway."""

    pools: tuple[PoolSpec, ...]
    members: tuple[MemberSpec, ...]


def from_config(config: GatewayConfig) -> Membership:
    """Return the membership of a command line. Raises ConfigError for lists that do not fit together.

    --target a,b --draft c,d        two targets and one pool of two drafts
    --draft c;d                     two draft pools
    --target x=a --draft y=c;z=d    pools with names
    """
    pool, of_target = _pool_name("target", config.target or "")
    pool = pool or TARGETS
    targets, drafts = _addresses("target", of_target), _draft_pools(config.draft)
    if pool in drafts:
        raise ConfigError(f"target and draft both have a pool {pool!r}; give them different names", param="target")
    addresses = [member.address for members in drafts.values() for member in members]
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"draft is {config.draft!r}, which names a worker twice", param="draft")
    if config.drafter.needs_pools and len(drafts) < 2:
        log.warning("drafter is %s, and draft is %r: it takes two pools, as in A;B", config.drafter, config.draft)
    deliver = _addresses("target_for_draft", config.target_for_draft) or targets
    if len(deliver) != len(targets):
        raise ConfigError(
            f"target_for_draft has {len(deliver)} addresses and target has {len(targets)}; give one for each, in order",
            param="target_for_draft",
        )
    named = next((address for address in targets if address.startswith(DNS)), None)
    if named is not None and config.target_for_draft is not None:
        raise ConfigError(
            f"target_for_draft is given and target has {named!r}, whose addresses drafts are told; leave one out",
            param="target_for_draft",
        )
    pools = [PoolSpec(pool, "target", config.model_name)]
    pools += [PoolSpec(name, "draft", serves=(pool,)) for name in drafts]
    members = [
        MemberSpec(f"target-{index}", pool, "target", address, deliver[index]) for index, address in enumerate(targets)
    ]
    return Membership(tuple(pools), (*members, *(member for pool in drafts.values() for member in pool)))


def from_proto(message: rpb.Membership) -> Membership:
    """Return the membership of a registry's message, without pools and members of an unknown role."""
    return Membership(
        tuple(
            PoolSpec(pool.name, _ROLES[pool.role], pool.model_name or None, tuple(pool.serves))
            for pool in message.pools
            if pool.role in _ROLES
        ),
        tuple(
            MemberSpec(
                member.name,
                member.pool,
                _ROLES[member.role],
                member.address,
                member.address,
                starting=not member.address
                or member.state not in (rpb.MEMBER_STATE_SERVING, rpb.MEMBER_STATE_DRAINING),
                draining=member.state == rpb.MEMBER_STATE_DRAINING,
                metrics_address=member.metrics_address,
                node=member.node,
                why=bound_text(member.why, MAX_REASON_BYTES),
            )
            for member in message.members
            if member.role in _ROLES
        ),
    )


def _draft_pools(text: str | None) -> dict[str, list[MemberSpec]]:
    pools: dict[str, list[MemberSpec]] = {}
    num_members = 0
    for number, part in enumerate([] if text is None else text.split(";"), start=1):
        if not part.strip():
            raise ConfigError(f"draft is {text!r}, which has an empty pool; write host:port;host:port", param="draft")
        given, addresses = _pool_name("draft", part)
        name = given or (DRAFTS if number == 1 else f"{DRAFTS}-{number}")
        if name in pools:
            raise ConfigError(f"draft is {text!r}, with two pools called {name}; give each its name", param="draft")
        found = list(enumerate(_addresses("draft", addresses), start=0 if given else num_members))
        called = DRAFTS if name == DRAFTS or not given else f"{DRAFTS}-{name}"
        pools[name] = [MemberSpec(f"{called}-{index}", name, "draft", address) for index, address in found]
        num_members += len(found)
    return pools


def _pool_name(name: str, text: str) -> tuple[str, str]:
    given, equals, addresses = text.rpartition("=")
    if equals and not _POOL_NAME.fullmatch(given.strip()):
        form = "POOL=host:port,host:port" + (";POOL=host:port" if name == "draft" else ", one pool")
        raise ConfigError(f"{name} has the pool {given.strip()!r}; write {form}", param=name)
    return given.strip(), addresses


def _addresses(name: str, text: str | None) -> list[str]:
    if text is None:
        return []
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"{name} is {text!r}, which has an empty address; write host:port,host:port", param=name)
    for address in found:
        if not is_host_port(address.removeprefix(DNS)):
            raise ConfigError(f"{name} has the address {address!r}, must be host:port", param=name)
    if len(set(found)) < len(found):
        raise ConfigError(f"{name} is {text!r}, which names a worker twice", param=name)
    return found
