"""A served model: a pool of targets, and the drafts that serve it.

It checks which workers fit together, and chooses a target and a draft for each request. Use it from the event loop's
thread alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Sequence

from gateway.admission.queue import AdmissionQueue
from gateway.chat_template import ChatTemplate, create_renderers
from gateway.generation import GenerationRequest, ServedFacts
from gateway.telemetry.vllm_names import ChoiceSeries, ModelLoad
from gateway.tokenizer import read_tokenizer
from gateway.tools.recognition import check_parsers, families_of
from gateway.workers.drafts.capabilities import offered_drafters, why_no_beams, why_no_trees
from gateway.workers.drafts.draft_limits import requested_speculation
from gateway.workers.drafts.reference_target import ReferenceTarget
from gateway.workers.links import WorkerLink
from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.membership import PoolSpec
from gateway.workers.request_placement import WorkerLoad, choose_draft, choose_target
from gateway.workers.retry_budget import RetryBudget
from gateway.workers.round_series import RoundSeries
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import IncompatiblePair, Unavailable
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.sampling_defaults import usable_defaults
from outrider.wire.requests.speculation import MAX_DRAFT_WORKERS
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.log import get_logger
from outrider.wire.telemetry.metrics import GatewayMetrics

log = get_logger(__name__)

POLL_S = 0.1
"""Seconds after which a choice that waits for a target looks again. A target that failed gets no choices for a while,
and no event wakes the waiting choice at the end of that time."""
TARGET_WAIT_S = 120.0
"""Maximal time for which a choice waits until a target is usable, in seconds."""
BEST_RANK = (False, 0)
"""Rank of a draft worker that fits a choice best: it runs the drafter that the request needs and, for a beam search,
can draft for beams."""


class SharedServices:
    """Objects that all served models of a gateway share, such as the retry budget."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics, chat_template: str | None) -> None:
        check_parsers(config.tool_call_parser, config.reasoning_parser)
        self.config = config
        self.metrics = metrics
        self.chat_template = chat_template
        self.renderers = create_renderers(config.max_compile_s)
        self.ended = ChoiceSeries(metrics.registry)
        self.slot_ids = itertools.count(1)
        self.retries = RetryBudget(max(10.0, config.max_running / 5))
        """Budget of retries. A full budget allows at once twice as many retries as choices may run on one target, so
        that all choices of a lost target can go on elsewhere."""
        self.pools_by_id: dict[str, str] = {}
        """Name of the target pool for each model id that requests may name."""
        self.paths_by_name: dict[str, str] = {}
        """Path of the target's model for each value of the label `target` in the metrics."""


class ServedModel:
    """One model that the gateway serves: a pool of targets, and the draft workers for it.

    The first target of the pool that connects determines the model's id, tokenizer and limits.
    """

    def __init__(self, spec: PoolSpec, shared: SharedServices) -> None:
        self.id = ""
        """Model id that requests name; empty until a first target has connected."""
        self.spec = spec
        self.config = shared.config
        self.metrics = shared.metrics
        self.ended = shared.ended
        self.slot_ids = shared.slot_ids
        self.retries = shared.retries
        self.targets: dict[str, TargetMember] = {}
        self.drafts: dict[str, DraftMember] = {}
        """Draft workers of all draft pools that serve this model, by name."""
        self.series = RoundSeries(self.metrics, lambda: self.drafts)
        self.draft_pools: tuple[str, ...] = ()
        """Names of the draft pools that serve this model, including pools without a member now."""
        self.places = AdmissionQueue(self.config)
        self.warn_once = functools.lru_cache(maxsize=64)(log.warning)
        self.referenced = asyncio.Event()
        """Event that is set once the reference target is known. That is the first target of the pool that connected."""
        self.num_rounds = self.num_late = 0
        """`num_rounds`: number of verdicts for slots that had a delivery earlier in the lease. `num_late`: number of
        verdicts that report draft tokens that came too late. Both count since the model was first served."""
        self.removed = False
        self.failures: tuple[str, ...] = ()
        """Reasons why the launcher does not start targets of the pool again."""
        self._shared = shared
        self._reference: ReferenceTarget | None = None
        self._changed = asyncio.Event()

    @property
    def reference(self) -> ReferenceTarget:
        """Reference target: the first of the pool that connected. Only valid once `referenced` is set."""
        assert self._reference is not None, f"{self.spec.name} has had no target"
        return self._reference

    def facts(self) -> ServedFacts:
        """Return the model's properties that front ends use and show, such as limits and drafters, as they are now."""
        reference = self.reference
        info = reference.info
        targets = self.targets.values()
        drafts = self.drafts.values()
        offered = offered_drafters(targets, drafts, self.draft_pools)
        return ServedFacts(
            id=self.id,
            context_limit=info.context_limit,
            vocab_size=info.vocab_size,
            created=reference.created,
            max_choices=self.config.max_running * max(1, len(self.targets)) + self.config.max_queue,
            draft_id=self._connected_draft_name(),
            drafters=offered,
            default_drafter=self._default_drafter(offered),
            chat_template=_kind_of(reference.tokenizer.template),
            no_trees=why_no_trees(targets, drafts),
            no_beams=why_no_beams(targets),
            decoder_start_ids=tuple(info.decoder_start_ids),
            sampling_defaults=self._sampling_defaults(info),
            text_only=info.is_text_only,
            model_path=reference.model_path,
        )

    def _connected_draft_name(self) -> str | None:
        drafter = self.config.drafter
        for draft in sorted(self.drafts.values(), key=lambda draft: _rank(draft, drafter)):
            if draft.connection is not None:
                return self.series.label_of(draft)
        return None

    def _default_drafter(self, offered: Sequence[Drafter]) -> Drafter | None:
        drafter = self.config.drafter
        if drafter in offered:
            return drafter
        of_target = drafter.own  # the default without its draft worker
        if of_target in offered:
            return of_target
        return None

    def _sampling_defaults(self, info: pb.WorkerInfo) -> dict[str, float]:
        if self.config.generation_config != "auto":
            return {}
        stated = {field.name: value for field, value in info.sampling_defaults.ListFields()}
        return usable_defaults(stated)

    def load(self) -> ModelLoad:
        """Return how many of the model's choices run and wait, and the KV cache in use by each target's last poll."""
        kv_shares = list[float]()
        num_kv_blocks = 0
        for target in self.targets.values():
            if target.connection is None:
                continue
            kv_shares.append(target.load.kv_share)
            if target.link.info is not None:
                num_kv_blocks += target.link.info.num_kv_blocks
        return ModelLoad(
            name=self.id,
            target=self.series.target_label,
            num_running=self.places.num_running,
            num_waiting=self.places.num_queued,
            kv_share=sum(kv_shares) / max(1, len(kv_shares)),
            kv_block_size=self.reference.info.kv_block_size,
            num_kv_blocks=num_kv_blocks,
        )

    def drafter_for(self, request: GenerationRequest) -> Drafter:
        """Return the drafter of a request: the one that it names, or else the default; for a beam search a draft model.

        Instead of the gateway's default, a request with a draft tree gets a draft model, unless the default merges
        draft tokens of several pools. With a fixed number of draft tokens, `auto` becomes a draft model if the model
        has a draft pool: the drafter is then always the same, so that a seed reproduces the text. With a prediction, a
        default draft model becomes a draft model plus the prediction.
        """
        options = request.speculation
        if request.params.beams is not None:
            return Drafter.MODEL
        default = self.config.drafter
        is_fixed = requested_speculation(request, self.config).is_fixed
        if options.tree is not None and not default.needs_pools:
            default = Drafter.MODEL
        if default is Drafter.AUTO and self.draft_pools and is_fixed:
            default = Drafter.MODEL
        if request.prediction_ids and default is Drafter.MODEL:
            default = Drafter.PREDICTION_MODEL
        return options.drafter or default

    def pools_for(self, request: GenerationRequest) -> Sequence[str | None]:
        """Return the names of the pools, at most MAX_DRAFT_WORKERS, of which one draft worker each drafts for the
        request. `(None,)` = only one draft worker drafts, of any pool.
        """
        if self.drafter_for(request).needs_pools and self.draft_pools:
            return self.draft_pools[:MAX_DRAFT_WORKERS]
        return (None,)

    # who may serve

    async def accept_target(self, info: pb.WorkerInfo, link: WorkerLink) -> None:
        """Check a target that has connected. The first target becomes the reference target.

        info: what the target says of itself. Raises IncompatiblePair if the target differs from the reference target.
        """
        if not self.referenced.is_set():
            files = await link.get_tokenizer()
            tokenizer = await read_tokenizer(files, self._shared.chat_template, self._shared.renderers)
            tokenizer.tool_call_parser = self._shared.config.tool_call_parser
            tokenizer.reasoning_parser = self._shared.config.reasoning_parser
            if not self.referenced.is_set():
                self.set_reference(ReferenceTarget(info, files, tokenizer, link.model_path))
        self.reference.check_target(info, link.model_path)

    def set_reference(self, reference: ReferenceTarget) -> None:
        """Set the reference target, and the model's id: the pool's `model_name` or else the target's own id.

        Raises IncompatiblePair if another pool serves a model with this id.
        """
        name = self.spec.model_name or reference.info.model_id
        pool = self._shared.pools_by_id.setdefault(name, self.spec.name)
        if pool != self.spec.name:
            raise IncompatiblePair(
                f"the model id {name!r} of the pool {self.spec.name} is that of the pool {pool} already; give one of "
                "them a model_name"
            )
        self._reference = reference
        template = reference.tokenizer.template
        if template is not None and template.accepts_tools:
            families = families_of(reference.tokenizer, template.tool_source)
            level = logging.INFO if families.calls is not None else logging.WARNING
            log.log(level, "model %s: %s", name, families.describe())
        if defaults := self._sampling_defaults(reference.info):
            shown = ", ".join(f"{key} {value:g}" for key, value in sorted(defaults.items()))
            log.info(
                "requests to %s that name no sampling parameters get those of its generation_config.json: %s "
                "(--generation-config none leaves them out)",
                name,
                shown,
            )
        self.series.target_label = self._label_of_target(reference)
        self._set_id(name)
        self.referenced.set()

    def _label_of_target(self, reference: ReferenceTarget) -> str:
        name = reference.info.model_id
        if self._shared.paths_by_name.setdefault(name, reference.model_path) != reference.model_path:
            name = f"{name}@{self.spec.name}"
        return name

    def change(self, spec: PoolSpec) -> None:
        """Apply a changed specification of the pool, which may give the model another id."""
        self.spec = spec
        if not self.referenced.is_set():
            return
        model_id = spec.model_name or self.reference.info.model_id
        previous = self.id
        pools_by_id = self._shared.pools_by_id
        pool = pools_by_id.get(model_id, spec.name)
        if pool != spec.name:
            log.error("the pool %s keeps the model id %s: %s is of the pool %s", spec.name, previous, model_id, pool)
        elif model_id != previous:
            del pools_by_id[previous]
            pools_by_id[model_id] = spec.name
            self._set_id(model_id)

    def _set_id(self, model_id: str) -> None:
        self.id = model_id
        self.metrics.answers(model_id)  # creates the series now: a rate misses the counts with which a series is born
        self.ended.begin(model_id)

    def remove(self) -> None:
        """Mark the model as removed, because its pool has left the membership. Its requests fail."""
        self.removed = True
        if self.referenced.is_set():
            self._shared.pools_by_id.pop(self.id, None)
            self._shared.paths_by_name.pop(self.series.target_label, None)
        self.note_change()

    def note_change(self) -> None:
        """Record that a worker of the model has connected, has left or has changed.

        This updates the queue's capacity and the metric series of draft workers, and wakes the choices that wait for a
        usable target.
        """
        num_usable = sum(map(_accepts_requests, self.targets.values()))
        self.places.capacity = self.config.max_running * max(1, num_usable)
        if self.referenced.is_set():
            self.series.update()
        self._changed.set()
        self._changed = asyncio.Event()

    def reason(self) -> str | None:
        """Return the reason why no request can be served now; None if one can."""
        if self.removed:
            return f"the pool {self.spec.name} is no longer served"
        members = self.targets.values()
        if any(map(_accepts_requests, members)):
            return None
        if not members:
            return ": ".join([f"no target in the pool {self.spec.name}", *self.failures])
        return "; ".join(f"no target at {member.spec.address}: {_why_not(member)}" for member in members)

    # placement

    def choose_target(self, key: bytes, avoid: str | None = None) -> TargetMember | None:
        """Return the target for a choice; None if no target is usable.

        key: digest of the beginning of the prompt, from `prefix_key`. avoid: name of a target that is chosen only if
        there is no other.
        """
        usable = list[WorkerLoad]()
        others = list[WorkerLoad]()
        for member in self.targets.values():
            if member.is_usable:
                usable.append(member.load)
                if member.name != avoid:
                    others.append(member.load)
        candidates = others or usable
        if not candidates:
            candidates = [member.load for member in self.targets.values() if member.is_usable_alone]
        name = choose_target(key, candidates)
        if name is None:
            return None
        return self.targets[name]

    async def place_target(self, choice: object, key: bytes, avoid: str | None = None) -> TargetMember:
        """Wait until a target is usable, and count a choice as placed on it.

        choice: any object that stands for the choice. key: digest of the beginning of its prompt, from `prefix_key`.
        avoid: name of a target that is chosen only if there is no other. Raises Unavailable if no target is usable
        within TARGET_WAIT_S.
        """
        give_up_s = time.monotonic() + TARGET_WAIT_S
        while True:
            member = self.choose_target(key, avoid)
            if member is not None:
                member.attach(choice)
                return member
            if self.removed or time.monotonic() >= give_up_s:
                raise Unavailable(self.reason() or "every target is failing; try again later", retry_after_s=1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()

    def has_other_free_target(self, target: TargetMember) -> bool:
        """Return whether a target other than `target` has a free slot."""
        others = (member for member in self.targets.values() if member is not target)
        return any(member.is_usable and not member.load.is_full for member in others)

    def choose_draft(
        self,
        target: TargetMember,
        avoid: str | None = None,
        drafter: Drafter = Drafter.MODEL,
        pool: str | None = None,
        searches: bool = False,
    ) -> DraftMember | None:
        """Return the best draft worker for a choice at this target, or None if none is usable.

        A draft worker that runs what the request's `drafter` needs comes first, then one with a model, then any. For a
        beam search (`searches`) a draft worker that can draft for beams comes before all others. Among equals, the one
        with the fewest choices comes first.

        avoid: name of a draft worker that is never chosen. pool: pool of the draft worker; None for any.

            # drafter MODEL: a busy draft worker with a model and a free slot comes before an idle one with a table
        """
        loads_by_rank = defaultdict[tuple[bool, int], list[WorkerLoad]](list)
        for draft in self.drafts.values():
            if (
                draft.name != avoid
                and pool in (None, draft.spec.pool)
                and draft.can_serve(target)
                and self._is_compatible(draft)
            ):
                loads_by_rank[_rank(draft, drafter, searches)].append(draft.load)
        for rank in sorted(loads_by_rank):
            name = choose_draft(loads_by_rank[rank])
            if name is not None:
                return self.drafts[name]
        return None

    def has_better_draft(
        self,
        draft: DraftMember,
        target: TargetMember,
        avoid: str | None,
        drafter: Drafter,
        pool: str | None,
        searches: bool,
    ) -> bool:
        """Return whether another draft worker with a free slot can run more of what a choice needs than `draft` can:
        the request's `drafter` and, if it `searches`, a beam search. Load is not compared.

        target: target of the choice. avoid: name of a draft worker that does not count. pool: pool of the other draft
        worker; None = any.
        """
        if len(self.drafts) < 2:
            return False
        rank = _rank(draft, drafter, searches)
        if rank == BEST_RANK:
            return False
        other = self.choose_draft(target, avoid, drafter, pool, searches)
        return other is not None and _rank(other, drafter, searches) < rank

    def _is_compatible(self, draft: DraftMember) -> bool:
        # The draft may have been compared, when it connected, with another model that it serves.
        return (
            self.referenced.is_set() and draft.link.info is not None and self.reference.is_compatible(draft.link.info)
        )


def _kind_of(template: ChatTemplate | None) -> str | None:
    if template is None:
        return None
    if template.marks_roles:
        return "turns"
    return "plain"


def _accepts_requests(member: TargetMember) -> bool:
    return member.connection is not None and not member.is_draining


def _rank(draft: DraftMember, drafter: Drafter, searches: bool = False) -> tuple[bool, int]:
    """Lower is better.

    For a drafter of the target's own merged with a model, only the model is compared: the rest is the target's.

    # drafter MODEL: (False, 0) for a draft with a model, (False, 2) for one with a table
    """
    info = draft.link.info
    cannot_search = searches and (info is None or not info.supports_beams)
    needed = drafter
    if drafter.uses_draft_worker:
        needed = Drafter.MODEL
    if draft.kind is needed:
        return cannot_search, 0
    if draft.kind is Drafter.MODEL:
        return cannot_search, 1
    return cannot_search, 2


def _why_not(member: TargetMember) -> str:
    if member.connection is not None:
        return "it is about to stop"
    if member.link.refused is None:
        return "not connected"
    return member.link.refused.message
