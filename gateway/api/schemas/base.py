"""Base classes of all bodies of requests: `StrictSchema` refuses unknown fields, `LenientSchema` ignores them."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outrider.wire.requests.params import Range
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

MAX_FIELDS = 64
"""Maximal number of fields of a JSON object in a body. A map whose keys the client chooses, such as `logit_bias`, may
have more."""
MAX_NAMED = 100
"""Maximal number of ignored fields whose names are logged in the life of a process. Clients choose the names, so a
limit is needed."""
MAX_NAME_CHARS = 80
"""Maximal number of characters of an ignored field's name that are logged."""
_named: set[str] = set()
"""Names of ignored fields that were logged already."""


def described(description: str, allowed: Range | None = None, **schema: Any) -> Any:
    """Return the pydantic field for an optional field of a body, with the default None.

    allowed: range of a number. It is only added to the description and the schema; other code checks it. schema:
    further keywords of the field's JSON schema.
    """
    if allowed is not None:
        description = f"{allowed}; {description}".removesuffix("; ")
        schema = allowed.schema | schema
    return Field(default=None, description=description, json_schema_extra=schema or None)


class StrictSchema(BaseModel):
    """Base class of bodies that refuse unknown fields. No value is converted: the string "0.5" is not a number."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        # pydantic makes an error of each unknown name, which takes seconds in a large object.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"has {len(value)} fields, at most {MAX_FIELDS} are allowed")
        return value


class LenientSchema(StrictSchema):
    """Base class of JSON objects in a body whose unknown fields are ignored, and logged once.

    For example, clients send back messages that other servers made, with fields that are unknown here.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _note_unknown(cls, value: Any) -> Any:
        if isinstance(value, dict):
            known = _field_names(cls)
            for name, field in value.items():
                if name not in known and field not in (None, []):
                    log_ignored(f"{name[:MAX_NAME_CHARS]!r} of {cls.__name__}")
        return value


def log_ignored(name: str) -> None:
    """Log that requests contain something that has no effect. name: what it is. Each name is logged once."""
    if name in _named or len(_named) >= MAX_NAMED:
        return
    _named.add(name)
    log.info("ignored in requests: %s (said once)", name)


@cache
def _field_names(cls: type[BaseModel]) -> frozenset[str | None]:
    names = set[str | None]()
    for name, field in cls.model_fields.items():
        names.update((name, field.alias))
    return frozenset(names)
