"""A served model: a pool of targets, and the drafts that serve it.

It checks which workers fit together, and chooses a target and a draft for each request. Use it from the event loop's
thread alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from gateway.admission.queue import AdmissionQueue
from gateway.chat_template import ChatTemplate, create_renderers
from gateway.generation import GenerationRequest, ServedFacts
from gateway.telemetry.vllm_names import EndedAnswers, ModelLoad
from gateway.tokenizer import Tokenizer, read_tokenizer
from gateway.workers.comparison import difference_between
from gateway.workers.draft_limits import asked_speculation
from gateway.workers.links import WorkerLink
from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.membership import PoolSpec
from gateway.workers.placement import choose_draft, choose_target
from gateway.workers.retry_budget import RetryBudget
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import IncompatiblePair, Unavailable
from outrider.wire.kinds import TABLES
from outrider.wire.models.pair import fits, misfit
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.sampling_defaults import usable_defaults
from outrider.wire.requests.speculation import MAX_DRAFTS
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.log import get_logger
from outrider.wire.telemetry.metrics import GatewayMetrics, PairMetrics
from outrider.wire.transport.rpc import describe_failure

log = get_logger(__name__)

POLL_S = 0.1
"""Seconds after which a request without a target looks again: the end of a worker's pause is not announced."""
MAX_GONE_DRAFTS = 8
"""Number of draft models whose series are kept after they have gone. A scrape comes every few seconds and reads their
last counts."""
TARGET_WAIT_S = 120.0
"""Maximal time that a request waits for a usable target, in seconds."""


@dataclass(frozen=True, slots=True)
class ReferenceTarget:
    """The first target of a pool, which every other worker of the model must fit."""

    info: pb.WorkerInfo
    files: pb.TokenizerFiles
    tokenizer: Tokenizer
    model_path: str
    """Path or id that its worker was started with. It distinguishes two folders of one name, and is not shown to users.
    """
    created: int = field(default_factory=lambda: int(time.time()))
    """Time when the target was first connected, in Unix seconds."""
    comparing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while a draft's tokenizer is fetched and compared, one at a time."""

    def check_target(self, info: pb.WorkerInfo, model_path: str) -> None:
        """Raise IncompatiblePair if another target of the pool differs from this one."""
        first = self.info
        if info.vocab_size != first.vocab_size or info.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise IncompatiblePair(
                f"the target {info.model_id} has vocabulary {info.vocab_size} {info.tokenizer_fingerprint[:12]}, "
                f"the pool was started with {first.vocab_size} {first.tokenizer_fingerprint[:12]}"
            )
        if _identity(info) != _identity(first):
            raise IncompatiblePair(
                f"the target came back as {_identity(info)}, the pool was started with {_identity(first)}; "
                "restart the gateway to serve another model"
            )
        if model_path != self.model_path:
            raise IncompatiblePair(
                f"the target is of another folder named {info.model_id} than the one the pool was started with; give "
                "all targets of a pool one folder, or restart the gateway to serve another model"
            )
        if info.decoder_start_ids != first.decoder_start_ids:
            raise IncompatiblePair(
                f"the target's answers begin with {list(info.decoder_start_ids)}, the pool was started with "
                f"{list(first.decoder_start_ids)}"
            )
        if info.context_limit < first.context_limit:
            raise IncompatiblePair(
                f"the target's context limit is {info.context_limit}, the pool was started with {first.context_limit}"
            )

    async def check_draft(self, info: pb.WorkerInfo, link: WorkerLink) -> None:
        """Raise IncompatiblePair, which names the first difference, if a draft does not fit."""
        if self.fits(info):
            return
        difference = None
        if self.info.tokenizer_fingerprint != info.tokenizer_fingerprint:
            async with self.comparing:
                difference = await self._difference(link)
        raise IncompatiblePair(misfit(info, self.info, difference))

    async def _difference(self, link: WorkerLink) -> str:
        try:
            theirs = await link.get_tokenizer()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return f"their tokenizers differ; the draft's is not read: {describe_failure(error)}"
        return await difference_between(self.files, theirs)

    def fits(self, draft: pb.WorkerInfo) -> bool:
        """Return whether a draft fits these targets."""
        return fits(draft, self.info)


def _identity(info: pb.WorkerInfo) -> str:
    """All that must not change for a request that continues on another target or after a restart."""
    exact = ", batch-invariant" if info.batch_invariant else ""
    quantization = info.quantization or "none"
    return f"{info.model_id} in {info.dtype} (quantization {quantization}{exact}) ending at {list(info.eos_token_ids)}"


class Shared:
    """Objects that all served models of a gateway share."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics, chat_template: str | None) -> None:
        self.config = config
        self.metrics = metrics
        self.chat_template = chat_template
        self.renderers = create_renderers(config)
        self.ended = EndedAnswers(metrics.registry)
        self.slot_ids = itertools.count(1)
        self.retries = RetryBudget(max(10.0, config.max_running / 5))
        """Budget of retries. Its reserve holds two retries for each running choice of a target, so that the loss of one
        target is paid for at once."""
        self.pools_by_id: dict[str, str] = {}
        """Target pools by the ids of the models that they serve."""
        self.paths_by_name: dict[str, str] = {}
        """Paths of the targets' models by the label `target` of their series."""


class ServedModel:
    """One model and its workers. The first target of the pool determines what the model is."""

    def __init__(self, spec: PoolSpec, shared: Shared) -> None:
        self.id = ""
        """Id by which requests name the model; empty until `referenced` is set."""
        self.spec = spec
        self.config = shared.config
        self.metrics = shared.metrics
        self.ended = shared.ended
        self.slot_ids = shared.slot_ids
        self.retries = shared.retries
        self.targets: dict[str, TargetMember] = {}
        self.drafts: dict[str, DraftMember] = {}
        """Drafts of all draft pools that serve this model, by name."""
        self.draft_pools: tuple[str, ...] = ()
        """Names of the draft pools that serve this model, including pools without a member now."""
        self.places = AdmissionQueue(self.config)
        self.warn_once = functools.lru_cache(maxsize=64)(log.warning)
        self.referenced = asyncio.Event()
        """Event that is set once `reference` is known."""
        self.num_rounds = self.num_late = 0
        """Number of verdicts that looked for draft tokens, and of those for which some came too late."""
        self.removed = False
        self.failures: tuple[str, ...] = ()
        """Reasons why targets of the pool do not start again."""
        self._shared = shared
        self._reference: ReferenceTarget | None = None
        self._target_name = ""
        """Label `target` of the model's series."""
        self._draft_name = ""
        """Label `draft` of the series of rounds without a draft: the label of the draft that was connected last."""
        self._draft_names: dict[str, None] = {}
        """Labels `draft` that have series. Those of drafts that have gone come first, in the order of going."""
        self._changed = asyncio.Event()

    @property
    def reference(self) -> ReferenceTarget:
        """First target of the pool. Only valid once `referenced` is set."""
        assert self._reference is not None, f"{self.spec.name} has had no target"
        return self._reference

    def facts(self) -> ServedFacts:
        """Return what front ends may show of the model now."""
        info = self.reference.info
        drafter = self.config.drafter
        drafts = sorted(self.drafts.values(), key=lambda draft: _rank(draft, drafter))
        names = [self.draft_name(draft) for draft in drafts if draft.connection is not None]
        offered = self._drafters()
        return ServedFacts(
            id=self.id,
            context_limit=info.context_limit,
            vocab_size=info.vocab_size,
            created=self.reference.created,
            max_answers=self.config.max_running * max(1, len(self.targets)) + self.config.max_queue,
            draft_id=names[0] if names else None,
            drafters=offered,
            default_drafter=next((each for each in (drafter, drafter.own) if each in offered), None),
            chat_template=_kind_of(self.reference.tokenizer.template),
            no_trees=self._no_trees(),
            no_beams=self._no_beams(),
            decoder_start_ids=tuple(info.decoder_start_ids),
            sampling_defaults=self._sampling_defaults(info),
            text_only=info.text_only,
            model_path=self.reference.model_path,
        )

    def _sampling_defaults(self, info: pb.WorkerInfo) -> dict[str, float]:
        if self.config.generation_config != "auto":
            return {}
        return usable_defaults({each.name: value for each, value in info.sampling_defaults.ListFields()})

    def load(self) -> ModelLoad:
        """Return the model's load, by the last poll of each target (twice a second)."""
        targets = [target for target in self.targets.values() if target.connection is not None]
        return ModelLoad(
            name=self.id,
            target=self._target_name,
            num_running=self.places.num_running,
            num_waiting=self.places.num_queued,
            kv_share=sum(target.load.kv_share for target in targets) / max(1, len(targets)),
            kv_block_size=self.reference.info.kv_block_size,
            num_kv_blocks=sum(target.link.info.num_kv_blocks for target in targets if target.link.info is not None),
        )

    def _drafters(self) -> tuple[Drafter, ...]:
        """Counts workers that are away by what they reported last, because they may be back."""
        infos = [member.link.info for member in self.targets.values() if member.link.info is not None]
        own = {drafter for info in infos for drafter in info.drafters}
        drafts = {draft.kind for draft in self.drafts.values()}
        has_model = Drafter.MODEL in drafts or (bool(self.draft_pools) and not drafts)

        def is_offered(drafter: Drafter) -> bool:
            if drafter.needs_pools:
                return len(self.draft_pools) > 1 and any(info.trees for info in infos)
            if not drafter.needs_draft_worker:
                return drafter in own or drafter in drafts
            needed = drafter if drafter.is_merged else drafter.own
            return has_model and (needed is None or needed in own)

        return tuple(filter(is_offered, Drafter))

    def _no_trees(self) -> str | None:
        for role, members in (("target", self.targets), ("draft", self.drafts)):
            infos = [member.connection.info for member in members.values() if member.connection is not None]
            if infos and not any(info.trees for info in infos):
                path = infos[0].attention_path or "none"
                why = "is no model" if path == TABLES else f"runs on the path {path}"
                return f"the {role} {infos[0].model_id} {why} and takes chains alone"
        return None

    def _no_beams(self) -> str | None:
        """One target without beams is enough, because a search may be placed on any of them."""
        infos = [member.connection.info for member in self.targets.values() if member.connection is not None]
        refusing = next((info for info in infos if not info.beams), None)
        if refusing is None:
            return None
        return (
            f"the target {refusing.model_id} runs no token trees on the path {refusing.attention_path}, as beams need"
        )

    def draft_name(self, draft: DraftMember | None) -> str:
        """Return the label `draft` of a draft's series; for None that of the draft that was connected last."""
        return self._draft_name if draft is None else self._labels().get(draft.name, self._draft_name)

    def _labels(self) -> dict[str, str]:
        known = [(draft, draft.link.info) for draft in self.drafts.values() if draft.link.info is not None]
        paths: dict[str, set[str]] = {}
        for draft, info in known:
            paths.setdefault(info.model_id, set()).add(draft.link.model_path)
        labels: dict[str, str] = {}
        for draft, info in known:
            is_alone = len(paths[info.model_id]) == 1
            labels[draft.name] = info.model_id if is_alone else f"{info.model_id}@{draft.spec.pool}"
        return labels

    def pair_metrics(self, draft_name: str) -> PairMetrics:
        """Return the series of rounds for the draft of this label."""
        if draft_name not in self._draft_names:
            self._forget_drafts()
            self._draft_names[draft_name] = None
        return self.metrics.pair(self._target_name, draft_name)

    def _forget_drafts(self) -> None:
        """Keeps the series of the last MAX_GONE_DRAFTS drafts that counted anything: a scrape may still read them."""
        present = set(self._labels().values())
        for name in present & self._draft_names.keys():
            del self._draft_names[name]
            self._draft_names[name] = None  # at the end: the last to go
        gone = [name for name in self._draft_names if name and name not in present]
        for place, name in enumerate(gone):
            if place < len(gone) - MAX_GONE_DRAFTS or not self.metrics.has_counts(self._target_name, name):
                self.metrics.forget_pair(self._target_name, name)
                del self._draft_names[name]
        if self._draft_name not in self._draft_names:
            self._draft_name = ""

    def drafter_for(self, request: GenerationRequest) -> Drafter:
        """Return the drafter of a request: the one that it names, or the gateway's default.

        A beam search always gets a draft model. A tree replaces the default by a draft model, unless the default takes
        several pools. With a fixed number of draft tokens, `auto` becomes a draft model if there is one: the drafter is
        then always the same, and a seed reproduces the text. With a prediction, a draft model becomes model and
        prediction together.
        """
        options = request.speculation
        if request.params.beams is not None:
            return Drafter.MODEL
        default = self.config.drafter
        is_fixed = asked_speculation(request, self.config).is_fixed
        if options.tree is not None and not default.needs_pools:
            default = Drafter.MODEL
        if default is Drafter.AUTO and self.draft_pools and is_fixed:
            default = Drafter.MODEL
        if request.prediction_ids and default is Drafter.MODEL:
            default = Drafter.PREDICTION_MODEL
        return options.drafter or default

    def pools_for(self, request: GenerationRequest) -> Sequence[str | None]:
        """Return the draft pools that each give the request one draft. `(None,)` stands for one draft of any pool."""
        if self.drafter_for(request).needs_pools and self.draft_pools:
            return self.draft_pools[:MAX_DRAFTS]
        return (None,)

    def own_metrics(self, label: str) -> PairMetrics:
        """Return the series of rounds for which the target drafts itself. label: of its own drafter, or GRAMMAR."""
        return self.metrics.pair(self._target_name, label)

    # who may serve

    async def accept_target(self, info: pb.WorkerInfo, link: WorkerLink) -> None:
        """Check a target that has connected. The first target becomes the reference.

        Raises IncompatiblePair if it differs from the reference.
        """
        if not self.referenced.is_set():
            files = await link.get_tokenizer()
            tokenizer = await read_tokenizer(files, self._shared.chat_template, self._shared.renderers)
            if not self.referenced.is_set():
                self.refer(ReferenceTarget(info, files, tokenizer, link.model_path))
        self.reference.check_target(info, link.model_path)

    def refer(self, reference: ReferenceTarget) -> None:
        """Set the reference target. Raises IncompatiblePair if another pool serves a model of the same id."""
        name = self.spec.model_name or reference.info.model_id
        pool = self._shared.pools_by_id.setdefault(name, self.spec.name)
        if pool != self.spec.name:
            raise IncompatiblePair(
                f"the model id {name!r} of the pool {self.spec.name} is that of the pool {pool} already; give one of "
                "them a model_name"
            )
        self._reference = reference
        if defaults := self._sampling_defaults(reference.info):
            shown = ", ".join(f"{key} {value:g}" for key, value in sorted(defaults.items()))
            log.info(
                "requests to %s that name no sampling parameters get those of its generation_config.json: %s "
                "(--generation-config none leaves them out)",
                name,
                shown,
            )
        self._target_name = self._label(reference)
        self._name(name)
        self.referenced.set()

    def _label(self, reference: ReferenceTarget) -> str:
        name = reference.info.model_id
        if self._shared.paths_by_name.setdefault(name, reference.model_path) != reference.model_path:
            name = f"{name}@{self.spec.name}"
        return name

    def change(self, spec: PoolSpec) -> None:
        """Apply a changed specification of the pool, which may give the model another id."""
        self.spec = spec
        if not self.referenced.is_set():
            return
        name, old = spec.model_name or self.reference.info.model_id, self.id
        pools_by_id = self._shared.pools_by_id
        if pools_by_id.get(name, spec.name) != spec.name:
            log.error(
                "the pool %s keeps the model id %s: %s is of the pool %s", spec.name, old, name, pools_by_id[name]
            )
        elif name != old:
            del pools_by_id[old]
            pools_by_id[name] = spec.name
            self._name(name)

    def _name(self, name: str) -> None:
        """Creates the series now: a rate misses the counts with which a series is born."""
        self.id = name
        self.metrics.answers(name)
        self.ended.begin(name)

    def remove(self) -> None:
        """Mark the model as removed with its pool. Its requests fail."""
        self.removed = True
        if self.referenced.is_set():
            self._shared.pools_by_id.pop(self.id, None)
            self._shared.paths_by_name.pop(self._target_name, None)
        self.note_change()

    def note_change(self) -> None:
        """Update the queue's capacity and the labels of drafts, and wake whoever waits for a change.

        Call it whenever a worker came, went or changed.
        """
        usable = sum(member.connection is not None and not member.draining for member in self.targets.values())
        self.places.capacity = self.config.max_running * max(1, usable)
        if self.referenced.is_set():
            for name, label in self._labels().items():
                if self.drafts[name].connection is not None:
                    self.pair_metrics(label)  # there from now on: a rate misses what a series is born with
                    self._draft_name = label
            self._forget_drafts()
        self._changed.set()
        self._changed = asyncio.Event()

    def reason(self) -> str | None:
        """Return why no request can be served now; None if one can."""
        if self.removed:
            return f"the pool {self.spec.name} is no longer served"
        members = list(self.targets.values())
        if any(member.connection is not None and not member.draining for member in members):
            return None
        if not members:
            return ": ".join([f"no target in the pool {self.spec.name}", *self.failures])
        return "; ".join(f"no target at {member.spec.address}: {_why_not(member)}" for member in members)

    # placement

    def choose_target(self, key: bytes, avoid: str | None = None) -> TargetMember | None:
        """Return the target for a request with this prefix key, or None without a usable one.

        `avoid` is chosen only if there is no other.
        """
        members = list(self.targets.values())
        usable = [member.load for member in members if member.usable]
        others = [load for load in usable if load.name != avoid]
        alone = [] if usable else [member.load for member in members if member.usable_alone]
        name = choose_target(key, others or usable or alone)
        return None if name is None else self.targets[name]

    async def place_target(self, request: object, key: bytes, avoid: str | None = None) -> TargetMember:
        """Wait for a target and attach the request to it.

        Raises Unavailable if none is usable within TARGET_WAIT_S.
        """
        give_up_s = time.monotonic() + TARGET_WAIT_S
        while True:
            member = self.choose_target(key, avoid)
            if member is not None:
                member.attach(request)
                return member
            if self.removed or time.monotonic() >= give_up_s:
                raise Unavailable(self.reason() or "every target is failing; try again later", retry_after_s=1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()

    def has_room_beside(self, target: TargetMember) -> bool:
        """Return whether another target has a free slot."""
        return any(member is not target and member.usable and not member.load.full for member in self.targets.values())

    def choose_draft(
        self,
        target: TargetMember,
        avoid: str | None = None,
        drafter: Drafter = Drafter.MODEL,
        pool: str | None = None,
        searches: bool = False,
    ) -> DraftMember | None:
        """Return the best draft for requests at this target, or None if no draft is usable.

        A draft that works as `drafter` asks comes first, then one with a model, then any. For a beam search
        (`searches`) a draft that can draft for it comes before all others.

        avoid: name of a draft that is never chosen. pool: pool that the draft must be of; None for any.
        """
        usable = [
            draft
            for draft in self.drafts.values()
            if draft.name != avoid and pool in (None, draft.spec.pool) and draft.serves(target) and self._fits(draft)
        ]
        for rank in sorted({_rank(draft, drafter, searches) for draft in usable}):
            name = choose_draft([draft.load for draft in usable if _rank(draft, drafter, searches) == rank])
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
        """Return whether another usable draft matches `drafter` better than `draft` does.

        The arguments are those of `choose_draft`.
        """
        if len(self.drafts) < 2:
            return False
        rank = _rank(draft, drafter, searches)
        other = self.choose_draft(target, avoid, drafter, pool, searches) if any(rank) else None
        return other is not None and _rank(other, drafter, searches) < rank

    def _fits(self, draft: DraftMember) -> bool:
        """The draft may have been compared, when it connected, with another model that it serves."""
        return self.referenced.is_set() and draft.link.info is not None and self.reference.fits(draft.link.info)


def _kind_of(template: ChatTemplate | None) -> str | None:
    if template is None:
        return None
    return "turns" if template.marks_turns else "plain"


def _rank(draft: DraftMember, drafter: Drafter, searches: bool = False) -> tuple[bool, int]:
    """Lower is better, and (False, 0) is a full match.

    For a drafter of the target's own merged with a model, only the model is compared: the rest is the target's.
    """
    wanted = Drafter.MODEL if drafter.asks_draft_worker else drafter
    cannot = searches and not (draft.link.info is not None and draft.link.info.beams)
    return cannot, 0 if draft.kind is wanted else 1 if draft.kind is Drafter.MODEL else 2


def _why_not(member: TargetMember) -> str:
    if member.connection is not None:
        return "it is about to stop"
    return "not connected" if member.link.refused is None else member.link.refused.message
