"""Checks of the names of environment variables, so that a misspelt setting is an error. Called by `config.load`."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Sequence

from pydantic_settings import BaseSettings

from outrider.wire.errors import ConfigError

_MIN_SIMILARITY = 0.75
"""Minimum similarity of two names (difflib's ratio, 0 to 1) at which one is taken for a misspelling of the other."""
_SERVICE_VARIABLE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)$")
"""Matches the end of the name of an environment variable that Kubernetes sets for a Service."""
_OTHER_NAMES = (
    # of the SDK, the engine and the launcher
    "API_KEY CACHE_DIR LAUNCHER_TLS_DIR "
    # of compose
    "BIND HTTP_PORT GRPC_PORT METRICS_BIND METRICS_PORT CLUSTER_FILE CLUSTER_INTERNAL SECRETS_DIR STOP_GRACE "
    "IMAGE_GATEWAY IMAGE_WORKER GPU_DRAFT GPU_TARGET CPUS_DRAFT CPUS_TARGET CPUS_GATEWAY CPUS_HEAD "
    "MEMORY_DRAFT MEMORY_TARGET MEMORY_GATEWAY MEMORY_HEAD "
    # of the workers' image
    "HEAD NODE_CPUS NODE_FOLDER NODE_LABELS OBJECT_STORE_BYTES START_TIMEOUT_S "
    # of the tests
    "REAL_MODEL"
)
OTHER_VARIABLES = frozenset(f"OUTRIDER_{name}" for name in _OTHER_NAMES.split())
"""Names of the OUTRIDER_ environment variables that are not settings of target, draft or gateway."""


def check_names(cls: type[BaseSettings], parts: Sequence[type[BaseSettings]]) -> None:
    """Raise ConfigError for an environment variable that looks like a misspelt setting. Such a variable has the prefix
    of `cls` but is not a setting of `cls`, or it is another OUTRIDER_ variable whose name is similar to a known name.

    cls: class of this process's settings. parts: the settings classes of all processes.
    """
    prefix = str(cls.model_config["env_prefix"])
    variables = dict[str, str]()  # by the setting's name: {"port": "OUTRIDER_DRAFT_PORT"}
    for key in os.environ:
        if key.upper().startswith(prefix):
            variables[key.upper().removeprefix(prefix).lower()] = key
    for key in variables.values():
        if _is_of_kubernetes(key):
            raise ConfigError(
                f"{key} is {os.environ[key]!r}, which Kubernetes writes for a Service of that name; "
                "say enableServiceLinks: false in the pod's spec"
            )
    for name, key in variables.items():
        if name not in cls.model_fields:
            known = _variables_of(cls)
            raise ConfigError(f"{key} is no setting of the {process_of(cls)}; {suggest(key.upper(), known)}")
    _check_other_variables(parts)


def _check_other_variables(parts: Sequence[type[BaseSettings]]) -> None:
    prefixes = tuple(str(part.model_config["env_prefix"]) for part in parts)
    known = set(OTHER_VARIABLES).union(*map(_variables_of, parts))
    for key in os.environ:
        name = key.upper()
        if not name.startswith("OUTRIDER_") or name.startswith(prefixes) or name in known or _is_of_kubernetes(key):
            continue
        # Compared without the common beginning, by which all names would be similar.
        suffixes = [other.removeprefix("OUTRIDER_") for other in known]
        close = difflib.get_close_matches(name.removeprefix("OUTRIDER_"), suffixes, 1, _MIN_SIMILARITY)
        if close:
            raise ConfigError(f"{key} is a setting of no part; did you mean OUTRIDER_{close[0]}?")


def _variables_of(cls: type[BaseSettings]) -> list[str]:
    return [f"{cls.model_config['env_prefix']}{name}".upper() for name in cls.model_fields]


def _is_of_kubernetes(key: str) -> bool:
    return bool(_SERVICE_VARIABLE.search(key)) or os.environ[key].startswith(("tcp://", "udp://", "sctp://"))


def process_of(cls: type[BaseSettings]) -> str:
    """Return the name of the process whose settings a class holds: target, draft or gateway."""
    return str(cls.model_config["env_prefix"]).removeprefix("OUTRIDER_").removesuffix("_").lower()


def suggest(written: str, known: Collection[str]) -> str:
    """Return the end of an error on an unknown name: "did you mean ...?" with the most similar known name, or a list of
    all known names if none is similar.

    written: the unknown name. known: the known names.
    """
    close = difflib.get_close_matches(written, known, 1, _MIN_SIMILARITY)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(sorted(known))}"
