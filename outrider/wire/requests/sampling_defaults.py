"""Sampling parameters that a checkpoint states in its generation_config.json, for requests that name none.

A target reads them, its gateway applies them. Both check them: a file and a peer may say anything.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Set
from typing import Any

from outrider.wire.requests.params import RANGES, SamplingParams

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
MAX_TOKENS = "max_tokens"
STATED = {**{name: name for name in SAMPLING}, "max_new_tokens": MAX_TOKENS}
"""By name in the file, what a request calls it."""


def stated_defaults(file: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Return what a generation_config.json states, and of each value that cannot be used why.

    `do_sample: false` says greedy decoding, of which a temperature or a cut beside it are no part.
    """
    found: dict[str, float] = {}
    wrong = []
    for theirs, ours in STATED.items():
        value = file.get(theirs)
        if value is None:
            continue
        if _is_usable(ours, value):
            found[ours] = value
        else:
            wrong.append(f"{theirs} is {reprlib.repr(value)}, must be {RANGES[ours]}")
    if file.get("do_sample") is False:
        limits = {name: value for name, value in found.items() if name == MAX_TOKENS}
        found = {"temperature": 0.0, **limits}
    return found, wrong


def usable_defaults(told: Mapping[str, float]) -> dict[str, float]:
    """Return of what a peer tells the values that can be used."""
    return {name: value for name, value in told.items() if _is_usable(name, value)}


def apply_defaults(params: SamplingParams, named: Set[str], defaults: Mapping[str, float]) -> SamplingParams:
    """Return the parameters with the defaults in place of those that the request has not named.

    Temperature 0 is greedy decoding, whoever says it: nothing else applies to it, not a penalty either.
    """
    if "temperature" not in named and "temperature" in defaults:
        params = dataclasses.replace(params, temperature=defaults["temperature"])
    if params.greedy:
        return params
    missing: dict[str, Any] = {name: defaults[name] for name in SAMPLING if name in defaults and name not in named}
    if "top_k" in missing:
        missing["top_k"] = int(missing["top_k"])
    return dataclasses.replace(params, **missing)


def _is_usable(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    bounds = RANGES[name]
    is_inside: bool = bounds.low <= value <= bounds.high
    if not is_inside or (bounds.above_low and value == bounds.low):
        return False
    return name not in ("top_k", MAX_TOKENS) or value == int(value)
