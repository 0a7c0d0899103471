"""What a worker's engine thread has made, with a model or without, and what GetInfo says of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider import __version__
from outrider.engine.open_slots import OpenSlots
from outrider.engine.step_times import StepTimes
from outrider.v1 import common_pb2 as pb
from outrider.wire.config import DraftConfig, TargetConfig
from outrider.wire.fingerprint import tokenizer_fingerprint
from outrider.wire.kinds import Drafter


@dataclass
class WorkerState:
    config: DraftConfig | TargetConfig
    epoch: int
    slots: OpenSlots[Any]
    tokenizer: pb.TokenizerFiles
    fingerprint: str = field(init=False)
    """Of the tokenizer; worked out once, since parsing a large vocabulary would hold up the event loop."""
    cpu_cores: tuple[int, ...] = field(init=False)
    """Of the engine thread, on which this is made."""
    metrics_address: str = ""
    num_tickets: Callable[[], int] = field(default=lambda: 0)
    times: StepTimes = field(default_factory=StepTimes)
    """Of the engine thread."""
    drafters: tuple[Drafter, ...] = ()
    """That need no model: of a target for its own drafts, of a draft without a model the one that it is."""
    draining: Callable[[], bool] = field(default=lambda: False)
    close: Callable[[], None] = field(default=lambda: None)
    """Ends the processes that hold shares of the weights. After the engine."""

    def __post_init__(self) -> None:
        self.fingerprint = tokenizer_fingerprint(self.tokenizer.tokenizer_json)
        self.cpu_cores = tuple(sorted(os.sched_getaffinity(0)))

    def info(self) -> pb.WorkerInfo:
        """All but what depends on whether there is a model."""
        return pb.WorkerInfo(
            tokenizer_fingerprint=self.fingerprint,
            context_limit=self.slots.context_limit,
            epoch=self.epoch,
            pid=os.getpid(),
            cpu_cores=self.cpu_cores,
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            num_slots=self.config.max_slots,
            num_slots_in_use=self.slots.num_in_use,
            metrics_address=self.metrics_address,
            num_tickets=self.num_tickets(),
            num_steps=self.times.num_steps,
            busy_us=int(self.times.busy_s * 1e6),
            longest_step_us=int(self.times.longest_s * 1e6),
            current_step_us=int(self.times.current_s * 1e6),
            draining=self.draining(),
            version=__version__,
            drafters=[each.value for each in self.drafters],
        )
