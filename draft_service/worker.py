"""Puts a draft worker together. Called by `python -m draft_service` and by the Ray actor: the same code in both.

Torch is imported inside `start_worker`, after the process has been pinned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.wire.config import DraftConfig
from outrider.wire.host import new_epoch, pin_process
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.rpc import tune_malloc
from outrider.wire.serving import AddServices, ServerThread

if TYPE_CHECKING:
    from outrider.engine.worker_handle import Loaded, WorkerHandle


def start_worker(config: DraftConfig) -> WorkerHandle:
    """Pin, load the model, listen. Returns when the worker can be called; raises ConfigError when it cannot start."""
    cores = pin_process(config.cpu_cores)
    tune_malloc()
    import torch

    from draft_service.deliveries import Deliverer
    from draft_service.proposer import Proposer
    from draft_service.servicer import DraftServicer
    from outrider.engine import worker_handle
    from outrider.engine.engine_thread import EngineThread
    from outrider.engine.slot_keeper import SlotKeeper
    from outrider.v1 import draft_pb2, draft_pb2_grpc

    torch.set_num_threads(len(cores))
    epoch, metrics, server = new_epoch(), WorkerMetrics("draft"), ServerThread()
    made: list[tuple[Loaded, Deliverer]] = []
    servicers: list[DraftServicer] = []

    def make(engine: EngineThread) -> Proposer:
        torch.set_num_threads(len(cores))
        loaded = worker_handle.load(config, epoch)
        loaded.num_steps = lambda: engine.num_steps
        facts = loaded.runner.facts
        deliverer = Deliverer(
            facts.vocab_size,
            config.max_message_bytes,
            dropped=lambda num_tokens: metrics.dropped_tokens.labels(why="backlog").inc(num_tokens),
        )
        made.append((loaded, deliverer))
        return Proposer(
            loaded.runner,
            SlotKeeper(loaded.slots, engine, metrics, facts.vocab_size, facts.eos_token_ids),
            engine,
            deliverer.send,
            metrics,
            loaded.max_prefill_tokens,
            config.full_logprobs_budget_bytes,
        )

    engine = EngineThread(make, server.post)

    def add_services(loaded: Loaded) -> AddServices:
        def add(grpc_server: Any) -> list[str]:
            vocab_size = loaded.runner.facts.vocab_size
            servicer = DraftServicer(engine, loaded.info, loaded.tokenizer, epoch, vocab_size)
            servicers.append(servicer)
            draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, grpc_server)
            return [draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name]

        return add

    async def closing() -> None:
        for servicer in servicers:
            await servicer.streams.end_all()
        for _, deliverer in made:
            await deliverer.close()

    return worker_handle.start(engine, server, config, metrics, add_services, lambda: made[0][0], closing)
