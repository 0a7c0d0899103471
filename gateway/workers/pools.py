"""Keeps the served models and the links to their workers in line with the membership. The gateway has one `Pools`.

A worker whose address changes counts as a new one. The requests of a worker that leaves continue on others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import grpc.aio

from gateway.telemetry.vllm_names import ModelLoad, VllmNames
from gateway.workers.links import RECONNECT_S, Connection, WorkerLink
from gateway.workers.member import DraftMember, Pairing, TargetMember
from gateway.workers.member_series import MemberSeries
from gateway.workers.membership import DNS, Membership, MemberSpec
from gateway.workers.served import ServedModel, Shared
from outrider.v1 import common_pb2 as pb
from outrider.v1 import registry_pb2 as rpb
from outrider.wire.errors import ConfigError, IncompatiblePair, OutriderError, Unavailable
from outrider.wire.peer_text import Reasons
from outrider.wire.settings.config import GatewayConfig, read_chat_template
from outrider.wire.telemetry.log import get_logger, log_fields
from outrider.wire.telemetry.metrics import GatewayMetrics
from outrider.wire.transport.hang_watch import MIN_SILENCE_S
from outrider.wire.transport.roles import Role as Part
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES, describe_failure
from outrider.wire.transport.tls import part_certificates

log = get_logger(__name__)

START_TIMEOUT_S = 300.0
"""Maximal wait at start for targets at given addresses, in seconds. With a registry or names, the wait after which it
is logged that no target has come."""
ROUND_TIMEOUT_S = 30.0
"""Maximal time that a worker with work may go without a step before it counts as lost, in seconds."""
DRAFT_MESSAGE_BYTES = 32 << 20
"""Maximal size of a draft's message, in bytes. Its tokenizer is the largest: Gemma's tokenizer.json has 33.4 MB.
Receiving that much takes 40 ms of the event loop."""
DRAFTS_WAIT_S = 20.0
"""Maximal time that a serving gateway waits for its drafts before it announces itself, in seconds."""
OTHERS_WAIT_S = 20.0
"""Maximal wait for the targets of other pools while one pool can be served, in seconds."""
HEARD_S = 2.0
"""Time within which a live worker must have replied, in seconds: each is polled twice a second."""


class Pools:
    """The served models and all their workers."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        """Create pools without members. Raises ConfigError for an unreadable chat template or certificate."""
        self.config = config
        self.certificates = part_certificates(config.tls_dir, Part.GATEWAY)
        self.metrics = metrics
        self.models: dict[str, ServedModel] = {}
        """Served models, by target pool."""
        self.members: dict[str, TargetMember | DraftMember] = {}
        self._shared = Shared(config, metrics, read_chat_template(config))
        self.renderers = self._shared.renderers
        self._serves: dict[str, tuple[str, ...]] = {}
        """Names of the target pools that a draft pool serves, by draft pool."""
        self._background: set[asyncio.Task[None]] = set()
        self._pairing: set[tuple[DraftMember, TargetMember]] = set()
        """Pairs of draft and target whose pairing check is running."""
        self._changed = asyncio.Event()
        self._membership = Membership((), ())
        self._series = MemberSeries(lambda: list(self.members.values()), lambda: self._membership)
        metrics.registry.register(self._series)
        metrics.registry.register(VllmNames(metrics, self._work))

    def is_connected(self, name: str) -> bool:
        """Return whether the stream to the member of this name is up."""
        member = self.members.get(name)
        return member is not None and member.connection is not None

    def _work(self) -> list[ModelLoad]:
        return [model.load() for model in self.models.values() if model.referenced.is_set()]

    def update(self, membership: Membership) -> None:
        """Apply a membership: serve its pools, connect new members, and remove those that have left."""
        self._membership = membership
        targets = {pool.name: pool for pool in membership.pools if pool.role == "target"}
        self._serves = {pool.name: pool.serves for pool in membership.pools if pool.role == "draft"}
        for name, spec in targets.items():
            if name not in self.models:
                self.models[name] = ServedModel(spec, self._shared)
            else:
                self.models[name].change(spec)
        wanted = {spec.name: spec for spec in map(self._as_seen, membership.members) if not spec.starting}
        for name, member in list(self.members.items()):
            spec_now = wanted.get(name)
            if spec_now is None or spec_now.address != member.spec.address or spec_now.pool != member.spec.pool:
                self._remove(member)
            else:
                member.spec = spec_now
                member.link.ask_again()
        for name, model in list(self.models.items()):
            if name not in targets:
                del self.models[name]
                model.remove()
        for name, spec_now in wanted.items():
            if name not in self.members:
                self._add(spec_now)
        for name, model in self.models.items():
            model.failures = tuple(
                dict.fromkeys(spec.why for spec in membership.members if spec.pool == name and spec.why)
            )
        self._share_drafts()
        self._pair(again=True)
        for model in self.models.values():
            model.note_change()
        self._note_change()

    def _as_seen(self, spec: MemberSpec) -> MemberSpec:
        """A launcher that does not see a worker takes it to be starting. If its stream is up here, it lives."""
        member = self.members.get(spec.name)
        if member is None or member.connection is None or not spec.starting or member.spec.pool != spec.pool:
            return spec
        return member.spec if spec.address in ("", member.spec.address) else spec

    async def wait_ready(self) -> None:
        """Wait, at start, until a target of every pool is connected or refused. Drafts are not waited for.

        If one pool can be served, the others are waited for at most OTHERS_WAIT_S. With a registry or names, the first
        target is waited for without end, because only whoever starts the workers knows how long they take to load.

        Raises Unavailable if no target comes in time to a given address. If all targets were refused, raises the reason
        (IncompatiblePair, ConfigError).
        """
        began_s = time.monotonic()
        come_and_go = self.config.registry is not None or DNS in (self.config.target or "")
        told = False
        while True:
            self._check_refused()
            missing = self._missing_target()
            if missing is None:
                return
            limit_s = OTHERS_WAIT_S if self.can_serve else START_TIMEOUT_S
            left_s = began_s + limit_s - time.monotonic()
            if left_s <= 0 and self.can_serve:
                log.warning("no %s within %g s: is it running there? Starting without", missing, limit_s)
                return
            if left_s <= 0 and not come_and_go:
                raise Unavailable(f"no {missing} within {limit_s:g} s: is it running there?", retry_after_s=1.0)
            if left_s <= 0 and not told:
                log.warning("no %s within %g s: is it running there? Waiting on", missing, limit_s)
                told = True
            await self._wait_change(left_s if left_s > 0 else None)

    async def wait_drafts(self) -> None:
        """Wait until every draft is connected or refused and its pairing checks are done, at most DRAFTS_WAIT_S.

        Requests are served meanwhile.
        """
        give_up_s = time.monotonic() + DRAFTS_WAIT_S
        while True:
            missing = self._missing_draft()
            if missing is None:
                return
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                log.warning("no %s within %g s: is it running there? Serving without", missing, DRAFTS_WAIT_S)
                return
            await self._wait_change(left_s)

    async def _wait_change(self, timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    @property
    def can_serve(self) -> bool:
        """Whether at least one of the models can be served."""
        return any(model.reason() is None for model in self.models.values())

    def _check_refused(self) -> None:
        refusals = [_why_refused(model) for model in self.models.values()]
        if refusals and refusals[0] is not None and None not in refusals:
            raise refusals[0]

    def _missing_target(self) -> str | None:
        for name, model in self.models.items():
            members = model.targets.values()
            if _why_refused(model) is None and all(member.connection is None for member in members):
                addresses = " or ".join(member.spec.address for member in members)
                return f"target at {addresses}" if addresses else f"target in the pool {name}"
        return None

    def _missing_draft(self) -> str | None:
        for member in self.members.values():
            if not isinstance(member, DraftMember) or not self._can_be_compared(member):
                continue
            if member.connection is None and member.link.refused is None:
                return f"draft at {member.spec.address}"
        for draft, target in self._neighbours():
            if draft.lacks_pairing(target):
                return f"pairing check of the draft at {draft.spec.address} with the target at {target.spec.address}"
        return None

    def _can_be_compared(self, draft: DraftMember) -> bool:
        """Until a target that the draft serves is connected, the draft waits for it as the gateway does."""
        served = [self.models[name] for name in self._serves.get(draft.spec.pool, ()) if name in self.models]
        return any(target.connection is not None for model in served for target in model.targets.values())

    def refusals(self) -> list[str]:
        """Return, as sentences, which workers do not start again or are refused, and why."""
        found = [
            f"{member.spec.role} at {member.spec.address}: {member.link.refused.message}"
            for member in self.members.values()
            if member.link.refused is not None
        ]
        for draft, target in self._neighbours():
            pairing = draft.pairing(target)
            if pairing is not None and pairing.why is not None:
                found.append(f"draft at {draft.spec.address}: {pairing.why}")
        for spec in self._membership.members:
            if spec.why and not self.is_connected(spec.name):
                found.append(f"{spec.role} {spec.name}: {spec.why}")
        return list(dict.fromkeys(found))  # of the targets of a model all say the same

    def report(self) -> rpb.GatewayReport:
        """Return the report for the launcher, without the gateway's name."""
        since_s = time.monotonic() - HEARD_S
        heard = [name for name, member in self.members.items() if member.link.heard_s >= since_s]
        return rpb.GatewayReport(pools=self._loads(), heard=heard)

    def _loads(self) -> list[rpb.PoolLoad]:
        return [
            rpb.PoolLoad(
                pool=name,
                num_running=model.places.num_running,
                num_queued=model.places.num_queued,
                num_refused=model.places.num_refused,
                num_rounds=model.num_rounds,
                num_late=model.num_late,
            )
            for name, model in self.models.items()
        ]

    async def close(self) -> None:
        """Close all links and the pool of renderers."""
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
            model.drafts = {
                member.name: member
                for member in self.members.values()
                if isinstance(member, DraftMember) and name in self._serves.get(member.spec.pool, ())
            }
            model.draft_pools = tuple(pool for pool, served in self._serves.items() if name in served)

    def _link(self, spec: MemberSpec, model: ServedModel | None) -> WorkerLink:
        count = self.metrics.wire_bytes.labels(link=f"gateway_{spec.role}", encoding="control").inc

        async def accept(info: pb.WorkerInfo, link: WorkerLink) -> None:
            if model is not None:
                await model.accept_target(info, link)
            else:
                await self._accept_draft(spec.pool, info, link)

        def changed(before: Connection | None, after: Connection | None) -> None:
            self._link_changed(spec.name, link, before, after)

        def heard(info: pb.WorkerInfo) -> None:
            member = self._member_of(spec.name, link)
            if member is not None:
                member.heard(info)

        with log_fields(member=spec.name):  # its task inherits them
            link = WorkerLink(
                spec.role,
                spec.address,
                max_message_bytes=MAX_MESSAGE_BYTES if spec.role == "target" else DRAFT_MESSAGE_BYTES,
                silence_s=(MIN_SILENCE_S, ROUND_TIMEOUT_S),
                accept=accept,
                count_bytes=count,
                on_change=changed,
                on_info=heard,
                certificates=self.certificates,
            )
        return link

    async def _accept_draft(self, pool: str, info: pb.WorkerInfo, link: WorkerLink) -> None:
        models = [self.models[name] for name in self._serves.get(pool, ()) if name in self.models]
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

    def _pair(self, *, again: bool = False) -> None:
        """`again` also repeats checks that failed.

        What has changed may have been in their way, such as another worker's memory.
        """
        for draft, target in self._neighbours():
            pairing = draft.pairing(target)
            is_refused = pairing is not None and pairing.why is not None
            if (draft.lacks_pairing(target) or (again and is_refused)) and (draft, target) not in self._pairing:
                self._pairing.add((draft, target))
                self._in_background(self._pair_with(draft, target))

    async def _pair_with(self, draft: DraftMember, target: TargetMember) -> None:
        """A draft that fails is not used at that target alone.

        The check is repeated when either worker has a new life.
        """
        failures = Reasons()
        try:
            while (ours := draft.connection) is not None and (theirs := target.connection) is not None:
                try:
                    why = await draft.link.pair(target.deliver_address, theirs.epoch)
                except grpc.aio.AioRpcError as error:
                    why = describe_failure(error)
                    if failures.note(why):
                        log.warning("the draft %s cannot be paired with %s now: %s", draft.name, target.name, why)
                    await asyncio.sleep(RECONNECT_S)
                    continue
                if why is not None:
                    why = f"draft {ours.info.model_id} does not fit target {theirs.info.model_id}: {why}"
                before = draft.pairing(target)
                draft.pairings[target.name] = Pairing(ours, theirs, why)
                if draft.pairing(target) is None:
                    continue  # one of them was started anew meanwhile
                if why is not None and (before is None or before.why != why):
                    log.warning("the draft at %s is not used: %s", draft.spec.address, why)
                return
        finally:
            self._pairing.discard((draft, target))
            self._pair()  # what came meanwhile
            self._note_change()

    def _member_of(self, name: str, link: WorkerLink) -> TargetMember | DraftMember | None:
        """Another member may have come under the same name, so the link is compared as well."""
        member = self.members.get(name)
        return member if member is not None and member.link is link else None

    def _link_changed(self, name: str, link: WorkerLink, before: Connection | None, after: Connection | None) -> None:
        member = self._member_of(name, link)
        if member is None:
            return
        member.changed(before, after)
        self._pair(again=True)
        for model in self.models.values():
            if name in model.targets or name in model.drafts:
                model.note_change()
        self._note_change()

    def _note_change(self) -> None:
        self._series.note_change()
        self._changed.set()  # wakes those who wait on this one; the next wait for another
        self._changed = asyncio.Event()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _why_refused(model: ServedModel) -> OutriderError | None:
    refusals = [member.link.refused for member in model.targets.values()]
    if not all(isinstance(each, (ConfigError, IncompatiblePair)) for each in refusals):
        return None
    return refusals[0] if refusals else None
