"""Who serves: pools and their members, as the command line or the launcher's registry says. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.v1 import registry_pb2 as rpb
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import GatewayConfig

Role = Literal["target", "draft"]
_ROLES: dict[int, Role] = {rpb.ROLE_TARGET: "target", rpb.ROLE_DRAFT: "draft"}
TARGETS, DRAFTS = "target", "draft"
"""Names of the two pools of a command line."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    name: str
    role: Role
    model_name: str | None = None
    """Target pools: the id it is served under; None = the model's own."""
    serves: tuple[str, ...] = ()
    """Draft pools: the target pools it drafts for."""


@dataclass(frozen=True, slots=True)
class MemberSpec:
    name: str
    pool: str
    role: Role
    address: str
    """host:port; empty while it is being started."""
    deliver_address: str = ""
    """Targets: where drafts reach it."""
    starting: bool = False
    draining: bool = False
    metrics_address: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Membership:
    pools: tuple[PoolSpec, ...]
    members: tuple[MemberSpec, ...]


def from_config(config: GatewayConfig) -> Membership:
    """Read `--target a,b --draft c,d`, or `--draft c;d` for two pools. Raises ConfigError for lists that do not fit
    together.
    """
    targets, drafts = _addresses("target", config.target), [_addresses("draft", each) for each in _pools(config.draft)]
    if len({each for pool in drafts for each in pool}) < sum(map(len, drafts)):
        raise ConfigError(f"draft is {config.draft!r}, which names a worker twice", param="draft")
    deliver = _addresses("target_for_draft", config.target_for_draft) or targets
    if len(deliver) != len(targets):
        raise ConfigError(
            f"target_for_draft has {len(deliver)} addresses and target has {len(targets)}; give one for each, in order",
            param="target_for_draft",
        )
    names = [DRAFTS, *(f"{DRAFTS}-{number}" for number in range(2, len(drafts) + 1))]
    members = [(pool, address) for pool, addresses in zip(names, drafts, strict=False) for address in addresses]
    pools = [PoolSpec(TARGETS, "target", config.model_name)]
    pools += [PoolSpec(name, "draft", serves=(TARGETS,)) for name, _ in zip(names, drafts, strict=False)]
    return Membership(
        tuple(pools),
        (
            *(
                MemberSpec(f"target-{index}", TARGETS, "target", address, deliver[index])
                for index, address in enumerate(targets)
            ),
            *(MemberSpec(f"draft-{index}", pool, "draft", address) for index, (pool, address) in enumerate(members)),
        ),
    )


def from_proto(message: rpb.Membership) -> Membership:
    """Read what the registry says, without pools and members of a role that this gateway does not know."""
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
            )
            for member in message.members
            if member.role in _ROLES
        ),
    )


def _pools(text: str | None) -> list[str]:
    return [] if text is None else text.split(";")


def _addresses(name: str, text: str | None) -> list[str]:
    if text is None:
        return []
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"{name} is {text!r}, which has an empty address; write host:port,host:port", param=name)
    if len(set(found)) < len(found):
        raise ConfigError(f"{name} is {text!r}, which names a worker twice", param=name)
    return found
