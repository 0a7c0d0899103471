"""Puts a draft worker together. Called by `python -m draft_service` and by the Ray actor: the same code in both.

Torch is imported inside `start_worker`, after the process has been pinned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.wire.config import DraftConfig
from outrider.wire.host import prepare_process

if TYPE_CHECKING:
    from outrider.engine.worker_handle import WorkerHandle


def start_worker(config: DraftConfig) -> WorkerHandle:
    """Pin, load the model, listen. Returns when the worker can be called; raises ConfigError when it cannot start."""
    cores = prepare_process(config.cpu_cores)

    from draft_service.deliveries import Deliverer
    from draft_service.proposer import Proposer
    from draft_service.servicer import DraftServicer
    from outrider.engine.loaded import Loaded, load
    from outrider.engine.worker_handle import Base, Parts, start
    from outrider.v1 import draft_pb2, draft_pb2_grpc

    def make(base: Base[Loaded]) -> Parts:
        metrics, loaded = base.metrics, base.loaded
        vocab_size = loaded.runner.facts.vocab_size
        deliverer = Deliverer(
            vocab_size,
            config.max_message_bytes,
            dropped=lambda num_tokens: metrics.dropped_tokens.labels(why="backlog").inc(num_tokens),
            certificates=base.certificates,
        )
        proposer = Proposer(
            loaded.runner,
            base.keeper,
            base.engine,
            deliverer.send,
            metrics,
            loaded.max_prefill_tokens,
            config.full_logprobs_budget_bytes,
        )

        def add_services(server: Any) -> list[str]:
            draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(base.service, vocab_size), server)
            return [draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name]

        return Parts(proposer, add_services, deliverer.close)

    return start("draft", config, len(cores), load, make)
