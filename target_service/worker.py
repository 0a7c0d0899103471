"""Puts a target worker together. Called by `python -m target_service` and by the Ray actor: the same code in both.

Torch is imported inside `start_worker`, after the process has been pinned.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from outrider.wire.config import TargetConfig
from outrider.wire.host import prepare_process

if TYPE_CHECKING:
    from outrider.engine.worker_handle import WorkerHandle


def start_worker(config: TargetConfig) -> WorkerHandle:
    """Pin, load the model, listen. Returns when the worker can be called; raises ConfigError when it cannot start."""
    cores = prepare_process(config.cpu_cores)
    num_threads = len(cores)
    if config.tensor_parallel > 1:
        if config.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers splits weights over GPUs wherever there are any
        if config.parallel_folder is None:  # the ranks that this one starts are on these cores too
            num_threads = max(1, len(cores) // config.tensor_parallel)

    from outrider.engine.loaded import Loaded, load
    from outrider.engine.worker_handle import Base, Parts, start
    from outrider.v1 import target_pb2, target_pb2_grpc
    from target_service.own_drafts import make_own_drafts
    from target_service.servicer import TargetServicer
    from target_service.tickets import TicketTable
    from target_service.verifier import Verifier

    def make(base: Base[Loaded]) -> Parts:
        metrics, loaded = base.metrics, base.loaded
        vocab_size = loaded.runner.facts.vocab_size
        tickets = TicketTable(
            config.max_parked_tickets,
            config.max_parked_bytes,
            config.parked_ttl_s,
            on_drop=lambda why, num_tokens: metrics.dropped_tokens.labels(why=why).inc(num_tokens),
        )
        loaded.num_tickets = lambda: len(tickets)
        own_drafts = make_own_drafts(config, loaded.tokenizer.tokenizer_json, vocab_size)
        loaded.drafters = own_drafts.offered
        rest = (metrics, loaded.max_prefill_tokens, config.verification == "block", own_drafts)
        verifier = Verifier(loaded.runner, base.keeper, tickets, base.engine, *rest)

        def add_services(server: Any) -> list[str]:
            servicer = TargetServicer(base.service, tickets, vocab_size)
            target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
            return [target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name]

        return Parts(verifier, add_services)

    return start("target", config, num_threads, load, make)
