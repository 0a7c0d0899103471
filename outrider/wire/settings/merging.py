"""`outrider up`'s settings: flags over the file over the environment over the demo pair."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from outrider.wire.errors import ConfigError
from outrider.wire.settings.pools import Values
from outrider.wire.settings.system import SystemConfig, demo_model

DEMO_NAME = "outrider-demo"
"""Id under which the demo pair is served: its folder's path would say little."""
_ROLES = ("target", "draft")
TABLE_DRAFTERS = ("ngram", "lookup", "unigram", "bigram")
"""Values of a draft's setting `drafter` that need no model."""


def merged(
    file: Values, flags: Values, *, no_draft: bool, no_ray: bool, certificates: Path | None = None
) -> SystemConfig:
    """`flags` by part, None where one was not given. Raises ConfigError naming what is wrong or contradicts.

    certificates: the folder with one for each part, as `outrider certs` makes it.
    """
    if no_draft and flags["draft"]["model"] is not None:
        raise ConfigError("--no-draft and --draft contradict each other; leave one out")
    if no_draft and flags["gateway"].get("tree") is not None:
        raise ConfigError("--no-draft and --tree contradict each other: a draft worker makes trees; leave one out")
    if no_ray and flags["ray"]["address"] is not None:
        raise ConfigError("--no-ray and --ray-address contradict each other; leave one out")
    flags = {**flags, "draft": _draft(flags["draft"], file.get("draft"))}
    off = {"draft": no_draft, "ray": no_ray}
    if "targets" in file or "drafts" in file:
        flags = _without_workers(flags, no_draft)
    values: dict[str, Any] = {**file, **{part: _part(part, file, flags[part], off.get(part, False)) for part in flags}}
    if "target" in flags:
        _fill_pair(values)
    serve_metrics(values)
    if certificates is not None:
        _use_certificates(values, certificates.absolute())
    return SystemConfig.read(values)


def serve_metrics(values: Values) -> None:
    """Each worker has a Prometheus endpoint, at a free port, unless its settings say another or null."""
    for role, pool in _workers(values):
        if not _in_environment(role, "metrics_port"):
            pool.setdefault("metrics_port", 0)


def _use_certificates(values: Values, folder: Path) -> None:
    """Every part its own, on all connections between them."""
    parts = [*_workers(values), ("gateway", values.get("gateway")), ("launcher", values.get("ray"))]
    for part, given in parts:
        if isinstance(given, dict):
            given["tls_dir"] = str(folder / part)


def _without_workers(flags: Values, no_draft: bool) -> Values:
    """The file names pools: flags for the one target or draft would be about none of them."""
    given = [(role, name) for role in _ROLES for name, value in flags[role].items() if value is not None]
    if no_draft or given:
        flag = "--no-draft" if no_draft else flag_of(*given[0])
        raise ConfigError(f"{flag} is for one target and one draft, and the file names pools; say it there")
    return {part: values for part, values in flags.items() if part not in _ROLES}


def flag_of(role: str, name: str) -> str:
    """Of a worker's setting on the command line."""
    if name == "dtype":  # for both
        return "--dtype"
    return f"--{role}" if name in ("model", "drafter", "drafter_text") else f"--{role}-{name.removeprefix('cpu_')}"


def _part(part: str, file: Values, flags: Values, off: bool) -> Values | None:
    """None = without this part: so said a flag, or the file and no flag."""
    given = {name: value for name, value in flags.items() if value is not None}
    from_file = file.get(part, {})
    if from_file is not None and not isinstance(from_file, dict):
        raise ConfigError(f"{part} is {from_file!r}, must be settings by name")
    if off or (from_file is None and not {"model", "drafter", "address"} & set(given)):
        return None
    return {**(from_file or {}), **given}


def _draft(flags: Values, from_file: object) -> Values:
    """`--draft`: a model, or one of those that need none, the latter with a text where they count in one."""
    named = flags["model"]
    if named is None:
        return flags
    drafter, _, text = str(named).partition(":")
    if drafter in TABLE_DRAFTERS:
        return {**flags, "model": None, "drafter": drafter, "drafter_text": text or None}
    told = (isinstance(from_file, dict) and "drafter" in from_file) or _in_environment("draft", "drafter")
    return {**flags, "drafter": "model"} if told else flags


def _is_of_tables(role: str, settings: Values) -> bool:
    """A draft without a model, which takes its tokenizer from the target where it names none."""
    drafter = settings.get("drafter") or os.environ.get("OUTRIDER_DRAFT_DRAFTER")
    return role == "draft" and drafter in TABLE_DRAFTERS and "model" not in settings


def _fill_pair(values: Values) -> None:
    """The demo pair where no model is named at all; half a pair is refused."""
    wanted = [role for role in _ROLES if values[role] is not None and not _is_of_tables(role, values[role])]
    unnamed = [role for role in wanted if "model" not in values[role] and not _in_environment(role, "model")]
    if unnamed and len(unnamed) < len(wanted):
        missing = unnamed[0]
        if missing == "draft":
            raise ConfigError(
                "only one model of the pair is named; say --draft MODEL, a drafter without a model "
                f"({', '.join(TABLE_DRAFTERS)}), or --no-draft"
            )
        named = values["draft"].get("model") or os.environ["OUTRIDER_DRAFT_MODEL"]
        raise ConfigError(f"only one model of the pair is named, {named!r} as draft; say --target MODEL")
    for role in unnamed:
        values[role]["model"] = demo_model(role)
    if unnamed and values["gateway"] is not None and not _in_environment("gateway", "model_name"):
        values["gateway"].setdefault("model_name", DEMO_NAME)


def _workers(values: Values) -> list[tuple[str, Values]]:
    """(role, settings) of each pool, where they have a form at all; `SystemConfig` says what is wrong with others."""
    pools = [(role, values.get(role)) for role in _ROLES]
    for role in _ROLES:
        named = values.get(f"{role}s")
        pools += [(role, pool) for pool in named.values()] if isinstance(named, dict) else []
    return [(role, pool) for role, pool in pools if isinstance(pool, dict)]


def _in_environment(role: str, setting: str) -> bool:
    return f"OUTRIDER_{role}_{setting}".upper() in os.environ
