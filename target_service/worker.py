"""Puts a target worker together. Called by `python -m target_service` and by the Ray actor: the same code in both.

Torch is imported inside `start_worker`, after the process has been pinned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.wire.config import TargetConfig
from outrider.wire.host import new_epoch, pin_process
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.rpc import tune_malloc
from outrider.wire.serving import AddServices, ServerThread

if TYPE_CHECKING:
    from outrider.engine.worker_handle import Loaded, WorkerHandle


def start_worker(config: TargetConfig) -> WorkerHandle:
    """Pin, load the model, listen. Returns when the worker can be called; raises ConfigError when it cannot start."""
    cores = pin_process(config.cpu_cores)
    tune_malloc()
    import torch

    from outrider.engine import worker_handle
    from outrider.engine.engine_thread import EngineThread
    from outrider.engine.slot_keeper import SlotKeeper
    from outrider.v1 import target_pb2, target_pb2_grpc
    from target_service.servicer import TargetServicer
    from target_service.tickets import TicketTable
    from target_service.verifier import Verifier

    torch.set_num_threads(len(cores))
    epoch, metrics, server = new_epoch(), WorkerMetrics("target"), ServerThread()
    tickets = TicketTable(
        config.max_parked_tickets,
        config.max_parked_bytes,
        config.parked_ttl_s,
        on_drop=lambda why, num_tokens: metrics.dropped_tokens.labels(why=why).inc(num_tokens),
    )
    made: list[Loaded] = []
    servicers: list[TargetServicer] = []

    def make(engine: EngineThread) -> Verifier:
        torch.set_num_threads(len(cores))
        loaded = worker_handle.load(config, epoch)
        loaded.num_tickets = lambda: len(tickets)
        made.append(loaded)
        loaded.num_steps = lambda: engine.num_steps
        facts = loaded.runner.facts
        keeper = SlotKeeper(loaded.slots, engine, metrics, facts.vocab_size, facts.eos_token_ids)
        return Verifier(loaded.runner, keeper, tickets, engine, metrics, loaded.max_prefill_tokens)

    engine = EngineThread(make, server.post)

    def add_services(loaded: Loaded) -> AddServices:
        def add(grpc_server: Any) -> list[str]:
            vocab_size = loaded.runner.facts.vocab_size
            servicer = TargetServicer(engine, tickets, loaded.info, loaded.tokenizer, epoch, vocab_size)
            servicers.append(servicer)
            target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, grpc_server)
            return [target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name]

        return add

    async def closing() -> None:
        for servicer in servicers:
            await servicer.streams.end_all()

    return worker_handle.start(engine, server, config, metrics, add_services, lambda: made[0], closing)
