"""Assemble a target worker. Called by `python -m target_service` and by the Ray actor: the same code in both.

Torch is imported inside `start_worker`, after the process has been pinned.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.wire.requests.drafters import Drafter
from outrider.wire.settings.config import TargetConfig
from outrider.wire.telemetry.phases import log_phase
from outrider.wire.transport.host import prepare_process

if TYPE_CHECKING:
    from outrider.engine.worker.worker_handle import WorkerHandle


def start_worker(config: TargetConfig, ranks_folder: str | None = None) -> WorkerHandle:
    """Start a target worker, and return its handle once it accepts calls. Raises ConfigError if the settings, the model
    or the port cannot be used.

    The function pins the process to its cores, loads the model, and listens. ranks_folder: folder through which the
    tensor-parallel ranks find each other, if another process starts ranks 1 and up. None = this process starts them.
    """
    cores = prepare_process(config.cpu_cores)
    num_threads = len(cores)
    if config.tensor_parallel > 1:
        if config.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers splits weights over GPUs wherever there are any
        if ranks_folder is None:  # the ranks that this process starts share its cores
            num_threads = max(1, len(cores) // config.tensor_parallel)

    log_phase("importing torch")
    import torch

    from outrider.engine.drafter_table import SearchDrafts, merge, target_drafters
    from outrider.engine.loading.cache_size import CPU_FRACTION
    from outrider.engine.loading.loaded import ModelWorkerState, load
    from outrider.engine.memory import free_memory_bytes
    from outrider.engine.worker.worker_handle import WorkerBase, WorkerParts, start
    from outrider.v1 import target_pb2, target_pb2_grpc
    from target_service.drafting.own_drafts import OwnDrafts
    from target_service.features.features import Features
    from target_service.features.own_heads import load_own_heads
    from target_service.features.registered_heads import Heads
    from target_service.leases.draft_buffer import buffer_bytes
    from target_service.leases.leases import Leases
    from target_service.servicer import TargetServicer
    from target_service.step.step import Step
    from target_service.step.verifier import Verifier

    def make(base: WorkerBase[ModelWorkerState]) -> WorkerParts:
        metrics = base.metrics
        loaded = base.loaded
        runner = loaded.runner
        vocab_size = runner.facts.vocab_size
        memory_bytes = int(CPU_FRACTION * free_memory_bytes(torch.device("cpu")))
        max_buffer_bytes = buffer_bytes(config.max_slots, vocab_size, memory_bytes)
        leases = Leases(max_buffer_bytes, metrics, base.engine.answer)
        loaded.num_leases = lambda: len(leases)
        features = Features(runner, leases)
        tokenizer_json = loaded.tokenizer.tokenizer_json
        drafters = target_drafters(config, runner, tokenizer_json)
        if config.heads is not None:
            drafters[Drafter.HEADS] = load_own_heads(config, runner, tokenizer_json, features)
        own_drafts = OwnDrafts(drafters, supports_trees=runner.supports_trees)
        loaded.drafters = own_drafts.available
        metrics.kept_feature_bytes.set_function(lambda: features.num_kept_bytes)
        step = Step(
            runner,
            base.keeper,
            leases,
            base.engine,
            metrics,
            loaded.max_prefill_tokens,
            own_drafts,
            features,
            merge,
        )
        verifier = Verifier(
            step,
            runner,
            base.keeper,
            leases,
            base.engine,
            loaded.max_prefill_tokens,
            own_drafts,
            features,
            SearchDrafts,
        )

        def add_services(server: Any) -> list[str]:
            registered = Heads(
                base.engine,
                metrics,
                runner.facts.hidden_size,
                runner.facts.num_layers,
                runner.features_refusal,
                runner.spare,
            )
            servicer = TargetServicer(base.service, vocab_size, leases.hand_in, registered, metrics)
            target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
            return [target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name]

        return WorkerParts(verifier, add_services)

    return start("target", config, num_threads, partial(load, ranks_folder=ranks_folder), make)
