"""The file of API keys: what `outrider keys` writes and the gateway reads. Keys are in it as hashes only."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from outrider.wire.errors import ConfigError
from outrider.wire.requests.scheduling import WEIGHT
from outrider.wire.settings.config import ContentControlTokens, Positive, reason
from outrider.wire.settings.files import write_whole

PREFIX = "or-"
KEY_BYTES = 32
"""Random bytes of a key: twice as many are no harder to guess in practice, and longer to paste."""
MAX_FILE_BYTES = 4 << 20
"""Bytes of the file, read on the event loop. Doubled, a change of the largest one holds it up twice as long."""
HEADING = (
    "# API keys of an Outrider gateway, hashed. Written by `outrider keys`; docs/keys.md says what the fields mean.\n"
)


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C is ten times as fast: the gateway reads the file on its event loop."""


def _in_utc(moment: datetime) -> datetime:
    """Without a zone it is UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


class ApiKey(BaseModel):
    """One key and what it may do. A limit that is absent does not hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Whose it is: in logs, metrics and errors, where the key itself never is."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the key, hexadecimal."""
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    """Prompt and output."""
    max_concurrent: Positive | None = None
    """Answers running or waiting at once."""
    weight: Annotated[float, Field(ge=WEIGHT.low, le=WEIGHT.high)] = 1.0
    """What it is given where others want it, too, over what a key of weight 1 is given."""
    control_tokens_in_content: ContentControlTokens = "allow"
    """text: control tokens in what its chats hold are text, whatever the gateway's own setting is."""
    expires: Annotated[datetime, AfterValidator(_in_utc)] | None = None
    """From then on it is refused. Without a zone it is UTC."""


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[ApiKey, ...]


def new_key() -> str:
    """256 random bits, to be shown once."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> str:
    """SHA-256, hexadecimal. A key has 256 random bits, so there is nothing to guess that a slow hash would protect."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """From YAML or JSON, {"keys": [...]}. Raises ConfigError naming the file, the line, the entry and what is wrong."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"api_keys: cannot read {path}: {error.strerror}; `outrider keys new` makes one") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"api_keys: {path} has over {MAX_FILE_BYTES} bytes")
    return _parse(data, path)


def _parse(data: bytes, path: str | Path) -> tuple[ApiKey, ...]:
    try:
        found = _KeyFile.model_validate(yaml.load(data, Loader=_LOADER))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        line = _line_of(first["loc"], data)
        raise ConfigError(f"api_keys: {path}, line {line}: {where or 'the file'}: {reason(first)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or no such date
        place = getattr(error, "problem_mark", None)  # its own message quotes the file
        where = "" if place is None else f", line {min(place.line + 1, len(data.splitlines()))}"
        raise ConfigError(f"api_keys: {path} is neither YAML nor JSON{where}") from None
    for field in ("name", "sha256"):
        seen: set[str] = set()
        for key in found.keys:
            if getattr(key, field) in seen:
                raise ConfigError(f"api_keys: {path} has two keys of the {field} of {key.name!r}; keep one")
            seen.add(getattr(key, field))
    return found.keys


def _line_of(place: tuple[int | str, ...], data: bytes) -> int:
    """Of what is there, or of what it is missing in. From 1."""
    node = yaml.compose(data, Loader=_LOADER)
    for part in place:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
        elif isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == part), node)
    return 1 if node is None else int(node.start_mark.line) + 1


def write_keys(path: str | Path, keys: tuple[ApiKey, ...]) -> None:
    """At once or not at all. A new file is for its owner alone, one that is there keeps owner and mode. Raises
    ConfigError.
    """
    entries: list[dict[str, Any]] = [
        key.model_dump(mode="json", exclude_none=True, exclude_defaults=True) for key in keys
    ]
    text = HEADING + yaml.safe_dump({"keys": entries}, sort_keys=False)
    write_whole(path, text.encode(), private=True)
