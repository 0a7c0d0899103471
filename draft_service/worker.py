"""Assemble a draft worker. Called by `python -m draft_service` and by the Ray actor: the same code in both.

Torch is imported inside `start_worker`, after the process has been pinned.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.wire.phases import log_phase
from outrider.wire.settings.config import DraftConfig
from outrider.wire.transport.host import prepare_process

if TYPE_CHECKING:
    from draft_service.jobs import RowsJob
    from outrider.engine.worker.worker_handle import Base, Parts, WorkerHandle


def start_worker(config: DraftConfig) -> WorkerHandle:
    """Pin, load the model or make the tables, listen, and return when the worker can be called. Raises ConfigError when
    it cannot.
    """
    cores = prepare_process(config.cpu_cores)

    log_phase("importing torch")
    from draft_service.loading import load_draft
    from draft_service.tables import load_tables
    from outrider.engine.worker import worker_handle

    load: Any = load_draft if config.has_model else load_tables
    return worker_handle.start("draft", config, len(cores), load, _parts)


def _parts(base: Base[Any]) -> Parts:
    from draft_service.deliveries import Deliverer
    from draft_service.drafters import create_drafter
    from draft_service.grower import Grower
    from draft_service.loading import ModelState
    from draft_service.pairing import WiringTest
    from draft_service.registration import HeadOffer
    from draft_service.servicer import DraftServicer
    from draft_service.vocabularies import TargetVocabularies
    from outrider.engine.worker.worker_handle import Parts
    from outrider.v1 import draft_pb2, draft_pb2_grpc
    from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES

    state, metrics, info = base.loaded, base.metrics, base.loaded.info()

    def take_rows(address: str, job: RowsJob) -> None:
        metrics.feature_rows.labels(peer=address, fate="received").inc(len(job.rows))
        metrics.feature_bytes.labels(peer=address, fate="received").inc(job.rows.nbytes)
        base.engine.submit(job)

    def left(address: str) -> None:
        metrics.forget_link(address)
        if test_wiring is not None:
            test_wiring.forget(address)

    deliverer = Deliverer(
        MAX_MESSAGE_BYTES,
        dropped=metrics.dropped_tokens.inc,
        certificates=base.certificates,
        offer=HeadOffer.of(state.head.opening) if info.needs_features else None,
        submit=take_rows,
        left=left,
    )
    test_wiring = None
    if info.needs_features:
        test_wiring = WiringTest(state, base.engine, metrics, deliverer.stub)
    vocabularies: TargetVocabularies | None = None
    if info.translates:
        service = base.service
        vocabularies = TargetVocabularies(info, service.tokenizer, service.own_vocabulary, deliverer.stub)
        service.vocabulary_of = vocabularies.of
        state.translations = vocabularies.infos.copy

    async def pair(address: str, target_epoch: int) -> None:
        if vocabularies is not None:
            await vocabularies.learn(address, target_epoch)
        if test_wiring is not None:
            await deliverer.register(address, target_epoch)
            await test_wiring(address, target_epoch)

    def add_services(server: Any) -> list[str]:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(base.service, pair), server)
        return [draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name]

    make_drafter = partial(create_drafter, state, base.keeper, metrics)
    open_ahead = state.open_ahead if isinstance(state, ModelState) else None
    grower = Grower(make_drafter, base.keeper, base.engine, deliverer.send, metrics, deliverer.request_rows, open_ahead)
    return Parts(grower, add_services, deliverer.close)
