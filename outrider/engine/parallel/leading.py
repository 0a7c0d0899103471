"""Loads a target on rank 0 of several, followers and all. Called by `loaded`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from outrider.engine.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.parallel.group import STEP_TIMEOUT
from outrider.engine.parallel.team import ParallelPath, Team
from outrider.wire.config import TargetConfig
from outrider.wire.errors import ConfigError, OutriderError


def load_split(
    options: dict[str, Any],
    config: TargetConfig,
    on_lost: Callable[[OutriderError], None],
    step_timeout: timedelta = STEP_TIMEOUT,
) -> tuple[ModelRunner, Team]:
    """options: of `load_runner`. on_lost, step_timeout: of `Team`. The caller closes the team.

    Raises ConfigError as `load_runner` does, and Unavailable when a follower does not come or is lost on the way;
    nothing is left running then. A follower that ended and said nothing may be what every path failed for, and its loss
    is what is raised; one that said why it ends says no more than this rank's own ConfigError.
    """
    if ":" in config.device:
        raise ConfigError(
            f"device is {config.device!r} and tensor_parallel {config.tensor_parallel}: ranks take the first devices "
            "that this process sees; say cuda and choose with CUDA_VISIBLE_DEVICES",
            param="device",
        )
    team = Team(config.tensor_parallel, on_lost, step_timeout)
    settings = options | {"log_level": config.log_level, "log_format": config.log_format}
    try:
        runner = load_runner(join=lambda device: team.gather(device, settings, config.parallel_folder), **options)
        team.begin_steps()
        runner.path = ParallelPath(runner.path, team, runner.facts.vocab_size)
    except BaseException as error:
        lost = team.lost
        team.close()
        if lost is not None and (team.lost_in_silence or not isinstance(error, ConfigError)):
            raise lost from error
        raise
    return runner, team
