"""Assemble a draft worker. Called by `python -m draft_service` and by the Ray actor: the same code in both.

Torch is imported inside `start_worker`, after the process has been pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.wire.phases import log_phase
from outrider.wire.settings.config import DraftConfig
from outrider.wire.transport.host import prepare_process

if TYPE_CHECKING:
    from draft_service.grower import MakeDrafter
    from draft_service.growing import Growing
    from draft_service.jobs import RowsJob
    from draft_service.pairing import Probe, WiringTest
    from draft_service.registration import HeadOffer
    from draft_service.tables import TableState
    from outrider.engine.speculation.drafter import NodeDrafter
    from outrider.engine.speculation.growth import OpenAhead
    from outrider.engine.worker.jobs import SlotKey
    from outrider.engine.worker.worker_handle import Base, Parts, WorkerHandle, WorkerState


def start_worker(config: DraftConfig) -> WorkerHandle:
    """Pin, load the model or make the tables, listen, and return when the worker can be called. Raises ConfigError when
    it cannot.
    """
    cores = prepare_process(config.cpu_cores)

    log_phase("importing torch")
    from outrider.engine.worker import worker_handle

    if not config.has_model:
        from draft_service.tables import load_tables

        return worker_handle.start("draft", config, len(cores), load_tables, _with_tables)
    from draft_service.loading import load_draft

    return worker_handle.start("draft", config, len(cores), load_draft, _with_model)


def _with_model(base: Base[WorkerState]) -> Parts:
    from draft_service.block_drafter import MedusaDrafter, PardDrafter, PEagleDrafter
    from draft_service.dflash_drafter import DFlashDrafter, DSparkDrafter
    from draft_service.feeding import Feeder
    from draft_service.head_drafter import HeadDrafter
    from draft_service.loading import HeadState, MedusaState, ModelState, PardState
    from draft_service.model_drafter import ModelDrafter
    from outrider.engine.heads.block_path import BlockHeadPath
    from outrider.engine.loading.loaded import Loaded

    state, keeper, engine = base.loaded, base.keeper, base.engine

    def make_drafter(growing: Mapping[SlotKey, Growing]) -> NodeDrafter[Growing]:
        if isinstance(state, MedusaState):
            return MedusaDrafter(state.heads.heads, keeper, engine.flush)
        assert isinstance(state, Loaded), "all others are run as models are"
        feeder = Feeder(state.runner, keeper, base.metrics, state.max_prefill_tokens, growing, engine.flush)
        if isinstance(state, HeadState):
            path, mask = state.head.path, state.head.mask
            if isinstance(path, BlockHeadPath):
                markov = path.head.markov_head
                if markov is None:
                    return DFlashDrafter(feeder, keeper, path)
                return DSparkDrafter(feeder, keeper, path, markov)
            return HeadDrafter(feeder, keeper, path) if mask is None else PEagleDrafter(feeder, keeper, mask)
        if isinstance(state, PardState):
            return PardDrafter(feeder, keeper, state.mask_id)
        return ModelDrafter(feeder, keeper)

    vocab_size = state.info().vocab_size
    if isinstance(state, HeadState | MedusaState):
        from draft_service.pairing import WiringTest
        from draft_service.registration import HeadOffer

        make_test = partial(WiringTest, state, engine, base.metrics)
        return _parts(base, vocab_size, make_drafter, HeadOffer.of(state.opening), make_test)
    if isinstance(state, ModelState):
        return _parts(base, vocab_size, make_drafter, translates=state.translates, open_ahead=state.open_ahead)
    return _parts(base, vocab_size, make_drafter)


def _with_tables(base: Base[TableState]) -> Parts:
    from draft_service.tables import TableDrafter

    vocab_size = base.loaded.vocabulary.size
    return _parts(base, vocab_size, lambda growing: TableDrafter(base.keeper, vocab_size, base.engine.flush))


def _parts(
    base: Base[Any],
    vocab_size: int,
    make_drafter: MakeDrafter,
    offer: HeadOffer | None = None,
    make_test: Callable[[Probe], WiringTest] | None = None,
    *,
    translates: bool = False,
    open_ahead: OpenAhead | None = None,
) -> Parts:
    """offer: the head of a draft that reads the target's features. make_test: of the test once that is registered.
    translates: it drafts for targets of other vocabularies, too. open_ahead: who has rows fed beside its nodes.
    """
    from draft_service.deliveries import Deliverer
    from draft_service.grower import Grower
    from draft_service.servicer import DraftServicer
    from draft_service.vocabularies import TargetVocabularies
    from outrider.engine.worker.worker_handle import Parts
    from outrider.v1 import draft_pb2, draft_pb2_grpc
    from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES

    metrics = base.metrics

    def take_rows(address: str, job: RowsJob) -> None:
        metrics.feature_rows.labels(peer=address, fate="received").inc(len(job.rows))
        metrics.feature_bytes.labels(peer=address, fate="received").inc(job.rows.nbytes)
        base.engine.submit(job)

    def left(address: str) -> None:
        metrics.forget_link(address)
        if test_wiring is not None:
            test_wiring.forget(address)

    deliverer = Deliverer(
        vocab_size,
        MAX_MESSAGE_BYTES,
        dropped=metrics.dropped_tokens.inc,
        certificates=base.certificates,
        offer=offer,
        submit=take_rows,
        left=left,
    )

    test_wiring = None if make_test is None else make_test(deliverer.probe)

    vocabularies: TargetVocabularies | None = None
    if translates:
        service = base.service
        vocabularies = TargetVocabularies(service.info(), service.tokenizer, service.own_vocabulary, deliverer.facts)
        service.vocabulary_of = vocabularies.of
        base.loaded.translations = vocabularies.infos

    async def pair(address: str, target_epoch: int) -> str | None:
        if vocabularies is not None:
            return await vocabularies.learn(address, target_epoch)
        if offer is None:
            return None
        why = await deliverer.pair(address, target_epoch)
        if why is None and test_wiring is not None:
            why = await test_wiring(address, target_epoch)
        return why

    def add_services(server: Any) -> list[str]:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(base.service, pair), server)
        return [draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name]

    request_rows = None if offer is None else deliverer.request_rows
    rest = (deliverer.send, metrics, vocab_size, request_rows, base.loaded.info().eos_token_ids, open_ahead)
    grower = Grower(make_drafter, base.keeper, base.engine, *rest)
    return Parts(grower, add_services, deliverer.close)
