"""Keeps the served models and the links to their workers in line with the membership. The gateway has one `Pools`.

A worker whose address changes counts as a new worker. If a worker leaves, its requests continue on others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

from gateway.telemetry.vllm_names import ModelLoad, VllmNames
from gateway.workers.connection import Connection
from gateway.workers.drafts.pairing_checks import PairingChecks
from gateway.workers.links import WorkerLink
from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.member_series import MemberSeries
from gateway.workers.membership import DNS, Membership, MemberSpec, PoolSpec
from gateway.workers.served import ServedModel, SharedServices
from outrider.v1 import common_pb2 as pb
from outrider.v1 import registry_pb2 as rpb
from outrider.wire.errors import ConfigError, IncompatiblePair, OutriderError, Unavailable
from outrider.wire.settings.config import GatewayConfig, read_chat_template
from outrider.wire.telemetry.log import get_logger, log_fields
from outrider.wire.telemetry.metrics import GatewayMetrics
from outrider.wire.transport.hang_watch import MIN_SILENCE_S
from outrider.wire.transport.roles import Role as Part
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES
from outrider.wire.transport.tls import role_certificates

log = get_logger(__name__)

START_TIMEOUT_S = 300.0
"""Maximal wait at start for targets at given addresses, in seconds. With a registry or DNS names the wait has no end; a
warning is then logged after this time."""
ROUND_TIMEOUT_S = 30.0
"""Seconds without a step after which a worker that has work counts as hung."""
DRAFT_MESSAGE_BYTES = 32 << 20
"""Maximal size of a message from a draft worker, in bytes. The largest message is the draft model's tokenizer: Gemma's
tokenizer.json has 33.4 MB. Receiving that much takes 40 ms of the event loop."""
DRAFTS_WAIT_S = 20.0
"""Maximal time for which a gateway that can serve waits for its draft workers before it reports ready, in seconds."""
OTHERS_WAIT_S = 20.0
"""Maximal wait at start for the targets of other pools once one pool can be served, in seconds."""
REPLY_MAX_AGE_S = 2.0
"""Seconds since a worker's last reply up to which the gateway reports to the launcher that the worker responds. Each
worker is polled at least once a second."""


class Pools:
    """All served models of a gateway and all their workers."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        """Create pools without members. Raises ConfigError for an unreadable chat template or certificate."""
        self.config = config
        self.certificates = role_certificates(config.tls_dir, Part.GATEWAY)
        self.metrics = metrics
        self.models: dict[str, ServedModel] = {}
        """Served models, by the name of their target pool."""
        self.members: dict[str, TargetMember | DraftMember] = {}
        self._shared = SharedServices(config, metrics, read_chat_template(config))
        self.renderers = self._shared.renderers
        self._serves: dict[str, tuple[str, ...]] = {}
        """Names of the target pools that each draft pool serves, by the draft pool's name."""
        self._background: set[asyncio.Task[None]] = set()
        self._pairing_checks = PairingChecks(self._neighbours, self._in_background, self._note_change)
        self._changed = asyncio.Event()
        self._membership = Membership((), ())
        self._series = MemberSeries(lambda: list(self.members.values()), lambda: self._membership)
        metrics.registry.register(self._series)
        metrics.registry.register(VllmNames(metrics, self._model_loads))

    def is_connected(self, name: str) -> bool:
        """Return whether the Control stream to the member with this name is up."""
        member = self.members.get(name)
        return member is not None and member.connection is not None

    def _model_loads(self) -> list[ModelLoad]:
        return [model.load() for model in self.models.values() if model.referenced.is_set()]

    def update(self, membership: Membership) -> None:
        """Apply a membership: serve its pools, connect new members, and remove those that have left."""
        self._membership = membership
        target_pools: dict[str, PoolSpec] = {}
        self._serves = {}
        for pool in membership.pools:
            if pool.role == "target":
                target_pools[pool.name] = pool
            else:
                self._serves[pool.name] = pool.serves
        started: dict[str, MemberSpec] = {}
        for listed in membership.members:
            spec = self._with_link_state(listed)
            if not spec.is_starting:
                started[spec.name] = spec

        self._serve_pools(target_pools)
        self._update_members(started)
        self._remove_models(target_pools)
        for name, spec in started.items():
            if name not in self.members:
                self._add(spec)
        self._note_failures()
        self._share_drafts()
        self._pairing_checks.start(repeats_failed=True)
        for model in self.models.values():
            model.note_change()
        self._note_change()

    def _serve_pools(self, target_pools: Mapping[str, PoolSpec]) -> None:
        for name, pool in target_pools.items():
            if name not in self.models:
                self.models[name] = ServedModel(pool, self._shared)
            else:
                self.models[name].change(pool)

    def _update_members(self, started: Mapping[str, MemberSpec]) -> None:
        for name, member in list(self.members.items()):
            spec = started.get(name)
            if spec is None or spec.address != member.spec.address or spec.pool != member.spec.pool:
                self._remove(member)
            else:
                member.spec = spec
                member.link.retry_now()

    def _remove_models(self, target_pools: Mapping[str, PoolSpec]) -> None:
        for name, model in list(self.models.items()):
            if name not in target_pools:
                del self.models[name]
                model.remove()

    def _note_failures(self) -> None:
        for name, model in self.models.items():
            reasons: dict[str, None] = {}  # a set that keeps the order
            for spec in self._membership.members:
                if spec.pool == name and spec.why:
                    reasons[spec.why] = None
            model.failures = tuple(reasons)

    def _with_link_state(self, spec: MemberSpec) -> MemberSpec:
        # A launcher that does not see a worker lists it as starting. If the gateway's stream to it is up, it lives.
        member = self.members.get(spec.name)
        if member is None or member.connection is None or not spec.is_starting or member.spec.pool != spec.pool:
            return spec
        if spec.address not in ("", member.spec.address):
            return spec
        return member.spec

    async def wait_ready(self) -> None:
        """Wait, at start, until a target of every pool is connected or refused, whether draft workers are there or not.

        Once one pool can be served, the wait for the others lasts at most OTHERS_WAIT_S. With a registry or DNS names,
        the wait for the first target has no end, because the gateway cannot see how long workers take to load.

        Raises Unavailable if no target connects in time at a given address. If all targets were refused, raises the
        error with which the first was refused (IncompatiblePair, ConfigError).
        """
        began_s = time.monotonic()
        come_and_go = self.config.registry is not None or DNS in (self.config.target or "")
        has_warned = False
        while True:
            self._check_refused()
            missing = self._missing_target()
            if missing is None:
                return
            limit_s = START_TIMEOUT_S
            if self.can_serve:
                limit_s = OTHERS_WAIT_S
            remaining_s = began_s + limit_s - time.monotonic()
            if remaining_s > 0:
                await self._wait_change(remaining_s)
                continue
            if self.can_serve:
                log.warning("no %s within %g s: is it running there? Starting without", missing, limit_s)
                return
            if not come_and_go:
                raise Unavailable(f"no {missing} within {limit_s:g} s: is it running there?", retry_after_s=1.0)
            if not has_warned:
                log.warning("no %s within %g s: is it running there? Waiting on", missing, limit_s)
                has_warned = True
            await self._wait_change(None)

    async def wait_drafts(self) -> None:
        """Wait, at most DRAFTS_WAIT_S, until each draft worker is refused, or connected with its pairing checks done.

        Requests are served during the wait.
        """
        deadline_s = time.monotonic() + DRAFTS_WAIT_S
        while True:
            missing = self._missing_draft()
            if missing is None:
                return
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                log.warning("no %s within %g s: is it running there? Serving without", missing, DRAFTS_WAIT_S)
                return
            await self._wait_change(remaining_s)

    async def _wait_change(self, timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    @property
    def can_serve(self) -> bool:
        """Whether requests for at least one of the models can be served now."""
        return any(model.reason() is None for model in self.models.values())

    def _check_refused(self) -> None:
        refusals = [_why_refused(model) for model in self.models.values()]
        if refusals and refusals[0] is not None and None not in refusals:
            raise refusals[0]

    def _missing_target(self) -> str | None:
        for name, model in self.models.items():
            members = model.targets.values()
            if _why_refused(model) is None and all(member.connection is None for member in members):
                if not members:
                    return f"target in the pool {name}"
                return "target at " + " or ".join(member.spec.address for member in members)
        return None

    def _missing_draft(self) -> str | None:
        for member in self.members.values():
            if not isinstance(member, DraftMember) or not self._can_be_compared(member):
                continue
            if member.connection is None and member.link.refused is None:
                return f"draft at {member.spec.address}"
        for draft, target in self._neighbours():
            if draft.is_pairing_due(target):
                return f"pairing check of the draft at {draft.spec.address} with the target at {target.spec.address}"
        return None

    def _can_be_compared(self, draft: DraftMember) -> bool:
        # Until a target that the draft serves is connected, the draft waits for it as the gateway does.
        for model in self._models_of(draft.spec.pool):
            for target in model.targets.values():
                if target.connection is not None:
                    return True
        return False

    def _models_of(self, draft_pool: str) -> list[ServedModel]:
        models: list[ServedModel] = []
        for name in self._serves.get(draft_pool, ()):
            if name in self.models:
                models.append(self.models[name])
        return models

    def refusals(self) -> list[str]:
        """Return one sentence for each worker that the gateway refuses, or that the launcher does not start again, with
        the reason.
        """
        reasons: list[str] = []
        for member in self.members.values():
            if member.link.refused is not None:
                reasons.append(f"{member.spec.role} at {member.spec.address}: {member.link.refused.message}")
        for draft, target in self._neighbours():
            pairing = draft.pairing(target)
            if pairing is not None and pairing.why is not None:
                reasons.append(f"draft at {draft.spec.address}: {pairing.why}")
        for spec in self._membership.members:
            if spec.why and not self.is_connected(spec.name):
                reasons.append(f"{spec.role} {spec.name}: {spec.why}")
        return list(dict.fromkeys(reasons))  # once: a draft fails the same way at all targets of a model

    def report(self) -> rpb.GatewayReport:
        """Return the gateway's report to the launcher: which workers have replied lately, and the load of each pool.

        The field with the gateway's name is left empty.
        """
        since_s = time.monotonic() - REPLY_MAX_AGE_S
        reachable = [name for name, member in self.members.items() if member.link.last_reply_s >= since_s]
        report = rpb.GatewayReport(responsive_workers=reachable)
        for name, model in self.models.items():
            report.pools.add(
                pool=name,
                num_running=model.places.num_running,
                num_queued=model.places.num_queued,
                num_refused=model.places.num_refused,
                num_rounds=model.num_rounds,
                num_late=model.num_late,
            )
        return report

    async def close(self) -> None:
        """Close all links and stop the processes that render chat templates."""
        for member in list(self.members.values()):
            self._remove(member)
        while self._background:
            await asyncio.wait(self._background)
        await self.renderers.close()

    def _add(self, spec: MemberSpec) -> None:
        if spec.role == "target":
            model = self.models.get(spec.pool)
            if model is None:
                log.error("the target %s is of the pool %s, which is not served", spec.name, spec.pool)
                return
            link = self._link(spec, model)
            target = TargetMember(spec, link)
            self.members[spec.name] = model.targets[spec.name] = target
        else:
            self.members[spec.name] = DraftMember(spec, self._link(spec, None))

    def _remove(self, member: TargetMember | DraftMember) -> None:
        del self.members[member.name]
        for model in self.models.values():
            model.targets.pop(member.name, None)
            model.drafts.pop(member.name, None)
        for draft in self.members.values():
            if isinstance(draft, DraftMember):
                draft.pairings.pop(member.name, None)
        self._in_background(member.link.close())

    def _share_drafts(self) -> None:
        for name, model in self.models.items():
            model.draft_pools = tuple(pool for pool, served in self._serves.items() if name in served)
            drafts: dict[str, DraftMember] = {}
            for member in self.members.values():
                if isinstance(member, DraftMember) and member.spec.pool in model.draft_pools:
                    drafts[member.name] = member
            model.drafts = drafts

    def _link(self, spec: MemberSpec, model: ServedModel | None) -> WorkerLink:
        count = self.metrics.wire_bytes.labels(link=f"gateway_{spec.role}", encoding="control").inc

        async def accept(info: pb.WorkerInfo, link: WorkerLink) -> None:
            if model is not None:
                await model.accept_target(info, link)
            else:
                await self._accept_draft(spec.pool, info, link)

        def changed(before: Connection | None, after: Connection | None) -> None:
            self._link_changed(spec.name, link, before, after)

        def polled(info: pb.WorkerInfo) -> None:
            member = self._member_of(spec.name, link)
            if member is not None:
                member.update_load(info)

        max_message_bytes = DRAFT_MESSAGE_BYTES
        if spec.role == "target":
            max_message_bytes = MAX_MESSAGE_BYTES
        with log_fields(member=spec.name):  # its task inherits them
            link = WorkerLink(
                spec.role,
                spec.address,
                max_message_bytes=max_message_bytes,
                silence_s=(MIN_SILENCE_S, ROUND_TIMEOUT_S),
                accept=accept,
                count_bytes=count,
                on_change=changed,
                on_info=polled,
                certificates=self.certificates,
            )
        return link

    async def _accept_draft(self, pool: str, info: pb.WorkerInfo, link: WorkerLink) -> None:
        models = self._models_of(pool)
        waiting = [asyncio.create_task(model.referenced.wait()) for model in models]
        try:
            if waiting:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        for model in models:
            if model.referenced.is_set():
                await model.reference.check_draft(info, link)

    def _neighbours(self) -> Iterator[tuple[DraftMember, TargetMember]]:
        for model in self.models.values():
            for draft in model.drafts.values():
                for target in model.targets.values():
                    yield draft, target

    def _member_of(self, name: str, link: WorkerLink) -> TargetMember | DraftMember | None:
        # Another member may have come under the same name, so the link is compared as well.
        member = self.members.get(name)
        if member is None or member.link is not link:
            return None
        return member

    def _link_changed(self, name: str, link: WorkerLink, before: Connection | None, after: Connection | None) -> None:
        member = self._member_of(name, link)
        if member is None:
            return
        member.changed(before, after)
        self._pairing_checks.start(repeats_failed=True)
        for model in self.models.values():
            if name in model.targets or name in model.drafts:
                model.note_change()
        self._note_change()

    def _note_change(self) -> None:
        self._series.note_change()
        self._changed.set()  # wakes those who wait for this event; later ones wait for the next
        self._changed = asyncio.Event()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _why_refused(model: ServedModel) -> OutriderError | None:
    """The reason of the first target, if all targets of the model are refused for good."""
    first: OutriderError | None = None
    for member in model.targets.values():
        refused = member.link.refused
        if not isinstance(refused, (ConfigError, IncompatiblePair)):
            return None
        first = first or refused
    return first
