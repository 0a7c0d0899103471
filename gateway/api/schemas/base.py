"""What all bodies of requests share: who refuses a name that is not known, and who ignores it."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outrider.wire.requests.params import Range
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

MAX_FIELDS = 64
"""Fields of a JSON object that is no map; more than any has."""
MAX_NAMED = 100
"""Ignored fields that the log names: clients choose the names, and real ones have a few dozen."""
MAX_NAME_CHARS = 80
"""Characters of such a name."""
_named: set[str] = set()
"""Ignored fields that the log has named."""


def described(description: str, allowed: Range | None = None, **schema: Any) -> Any:
    """Return an optional field; `allowed` is its range, in the description too. `schema`: what OpenAPI says besides."""
    if allowed is not None:
        description, schema = f"{allowed}; {description}".removesuffix("; "), allowed.schema | schema
    return Field(default=None, description=description, json_schema_extra=schema or None)


class Strict(BaseModel):
    """Unknown names are refused, and nothing is converted: "0.5" is no number."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        """Refuse large objects: pydantic makes an error of each unknown name, which takes seconds."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"has {len(value)} fields, at most {MAX_FIELDS} are allowed")
        return value


class Lenient(Strict):
    """An object that describes something: names that are not known are ignored, and the log names each once. Clients
    send back what they got, also from other servers.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _note_unknown(cls, value: Any) -> Any:
        if isinstance(value, dict):
            known = _known(cls)
            for name, each in value.items():
                if name not in known and each not in (None, []):
                    note_ignored(f"{name[:MAX_NAME_CHARS]!r} of {cls.__name__}")
        return value


def note_ignored(what: str) -> None:
    """Name something that a request has and that changes nothing, once, in the log."""
    if what in _named or len(_named) >= MAX_NAMED:
        return
    _named.add(what)
    log.info("ignored in requests: %s (said once)", what)


@cache
def _known(cls: type[BaseModel]) -> frozenset[str | None]:
    """Return the names of a class's fields."""
    return frozenset(name for key, field in cls.model_fields.items() for name in (key, field.alias))
