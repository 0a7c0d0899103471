"""`python -m deploy.compose_check --config FILE`: the service `check` of docker-compose.yml, which runs before others.

Exit code 1, and one line on stderr, for a variable that is no setting, a value that no part accepts, and a model's
folder that cannot be read: `docker compose up` then ends.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.launcher import read_arguments, read_config
from outrider.wire.errors import ConfigError
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.system import gateway_config
from outrider.wire.settings.variables import OTHER_VARIABLES, suggest
from outrider.wire.telemetry.log import log_end

_PART = re.compile("OUTRIDER_(GATEWAY|TARGET|DRAFT)_")
_FOLDERS = {"MODEL": "OUTRIDER_TARGET_MODEL", "DRAFT": "OUTRIDER_DRAFT_MODEL"}
"""By the user's variable with a model's path outside the container: the variable with its path inside."""
_LINKS = "links of a hub's cache lead out of the folder; copy it with `cp -rL`, or download it with `--local-dir`"


def check(argv: Sequence[str], variables: Mapping[str, str]) -> None:
    """Raise ConfigError for settings with which `docker compose up` cannot start.

    argv: command-line arguments of `deploy.launcher`. variables: environment variables of the compose file's service
    `check`.
    """
    _check_names(variables)
    if variables.get("DRAFT") and not variables.get("MODEL"):
        raise ConfigError(f"DRAFT is {variables['DRAFT']!r} and MODEL is not set: name the model that it drafts for")
    for name, inside in _FOLDERS.items():
        if variables.get(name):
            _check_folder(name, variables[name], Path(variables[inside]))
    config = read_config(read_arguments(argv), StopFlag())
    served = None
    if variables.get("MODEL"):
        served = variables.get(_FOLDERS["MODEL"])
    if served and served not in [pool.worker.model for pool in config.target_pools]:
        raise ConfigError(
            f"MODEL is {variables['MODEL']!r}, and the pools of OUTRIDER_CLUSTER_FILE name their models: leave one out"
        )
    gateway_config({}, registry="launcher:7000")


def _check_names(variables: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable that no part reads. Variables with a part's prefix are checked with its
    settings.
    """
    for name in variables:
        if name.startswith("OUTRIDER_") and not _PART.match(name) and name not in OTHER_VARIABLES:
            raise ConfigError(f"{name} is no setting; {suggest(name, OTHER_VARIABLES)}")


def _check_folder(name: str, path: str, folder: Path) -> None:
    """Raise ConfigError if the folder contains no model. path: the folder's path outside of the container, for the
    message.
    """
    if not folder.is_dir():
        raise ConfigError(f"{name} is {path!r}, which is a file; give the folder it lies in")
    config = folder / "config.json"
    try:
        config.read_bytes()
    except PermissionError:
        raise ConfigError(f"{name} is {path!r}, which user {os.getuid()} cannot read: `chmod -R a+rX` it") from None
    except OSError:
        why = "it has no config.json"
        if config.is_symlink():
            why = f"its config.json is a link to nowhere: {_LINKS}"
        raise ConfigError(f"{name} is {path!r}, and that is no model's folder: {why}") from None


def main(argv: Sequence[str]) -> int:
    """Check the settings. Return the exit code: 0 if `docker compose up` can start with them, else 1."""
    try:
        check(argv, os.environ)
    except ConfigError as error:
        log_end("check", error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
