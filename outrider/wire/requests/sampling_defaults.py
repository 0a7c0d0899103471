"""Defaults of sampling parameters from a checkpoint's generation_config.json, for requests that do not give them.

The target reads and reports the defaults, and the gateway applies them. Both check the values, since neither the file
nor a peer is trusted.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Set
from typing import Any

from outrider.wire.requests.params import RANGES, SamplingParams

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Names of those sampling parameters that have the same name in generation_config.json and in a request."""
MAX_TOKENS = "max_tokens"
STATED = {name: name for name in SAMPLING} | {"max_new_tokens": MAX_TOKENS}
"""Maps the name of a parameter in generation_config.json to its name in a request."""


def read_defaults(file: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Return (defaults, faults), given the content of a generation_config.json. `defaults` has the usable values by
    their names in a request, and `faults` a sentence for each value that cannot be used.

    `do_sample: false` in the file means greedy decoding: the defaults are then temperature 0 and, if the file gives it,
    max_tokens.
    """
    defaults: dict[str, float] = {}
    faults = list[str]()
    for file_name, name in STATED.items():
        value = file.get(file_name)
        if value is None:
            continue
        if _is_usable(name, value):
            defaults[name] = value
        else:
            faults.append(f"{file_name} is {reprlib.repr(value)}, must be {RANGES[name]}")
    if file.get("do_sample") is False:
        greedy = {"temperature": 0.0}
        if MAX_TOKENS in defaults:
            greedy[MAX_TOKENS] = defaults[MAX_TOKENS]
        return greedy, faults
    return defaults, faults


def usable_defaults(reported: Mapping[str, float]) -> dict[str, float]:
    """Return the sampling defaults that a target reports, without those that are out of range. reported: values by
    name.
    """
    return {name: value for name, value in reported.items() if _is_usable(name, value)}


def apply_defaults(params: SamplingParams, named: Set[str], defaults: Mapping[str, float]) -> SamplingParams:
    """Return the parameters of a request, where defaults replace those that the request does not give.

    named: names of the parameters that the request gives. defaults: values by name. If the temperature is then 0,
    whether by the request or by a default, decoding is greedy and no other default applies, not even a penalty.
    """
    if "temperature" not in named and "temperature" in defaults:
        params = dataclasses.replace(params, temperature=defaults["temperature"])
    if params.greedy:
        return params
    missing: dict[str, Any] = {}
    for name in SAMPLING:
        if name in defaults and name not in named:
            missing[name] = defaults[name]
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
