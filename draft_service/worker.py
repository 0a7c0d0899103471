"""Assemble a draft worker. Called by `python -m draft_service` and by the Ray actor: the same code in both.

Torch is imported inside `start_worker`, after the process has been pinned.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.wire.settings.config import DraftConfig
from outrider.wire.telemetry.phases import log_phase
from outrider.wire.transport.host import prepare_process

if TYPE_CHECKING:
    from outrider.engine.worker.worker_handle import WorkerBase, WorkerHandle, WorkerParts


def start_worker(config: DraftConfig) -> WorkerHandle:
    """Start a draft worker, and return its handle once it accepts calls. Raises `ConfigError` if it cannot start.

    The function pins the process to its cores, loads the model or makes the tables, and listens.
    """
    cores = prepare_process(config.cpu_cores)

    log_phase("importing torch")
    from draft_service.drafters.loading import load_draft
    from draft_service.drafters.table_drafters import load_tables
    from outrider.engine.worker import worker_handle

    load: Any = load_tables
    if config.has_model:
        load = load_draft
    return worker_handle.start("draft", config, len(cores), load, _parts)


def _parts(base: WorkerBase[Any]) -> WorkerParts:
    from draft_service.drafters.drafter_choice import create_drafter
    from draft_service.drafters.loading import ModelState
    from draft_service.growing.grower import Grower
    from draft_service.servicer import DraftServicer, PairingCheck
    from draft_service.targets.deliveries import Deliverer
    from draft_service.targets.pairing import WiringTest
    from draft_service.targets.registration import SerializedHead
    from draft_service.targets.vocabularies import TargetVocabularies
    from outrider.engine.worker.worker_handle import WorkerParts
    from outrider.v1 import draft_pb2, draft_pb2_grpc

    state = base.loaded
    metrics = base.metrics
    service = base.service
    info = state.info()
    head = None
    if info.needs_features:
        head = SerializedHead.of(state.head.projection)
    deliverer = Deliverer(metrics, base.engine.submit, base.certificates, head)
    checks = list[PairingCheck]()
    if info.supports_retokenization:
        vocabularies = TargetVocabularies(info, service.tokenizer, service.own_vocabulary, deliverer.stub)
        service.vocabulary_of = vocabularies.of
        state.shared_vocabularies = vocabularies.infos
        checks.append(vocabularies.learn)
    if info.needs_features:
        checks += [deliverer.register, WiringTest(state, base.engine, metrics, deliverer.stub)]

    def add_services(server: Any) -> list[str]:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(service, checks), server)
        return [draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name]

    make_drafter = partial(create_drafter, state, base.keeper, metrics)
    open_ahead = None
    if isinstance(state, ModelState):
        open_ahead = state.open_ahead
    grower = Grower(
        make_drafter, base.keeper, base.engine, deliverer.send, metrics, deliverer.request_features, open_ahead
    )
    return WorkerParts(grower, add_services, deliverer.close)
