"""The file of API keys, which `outrider keys` writes and the gateway reads. It holds keys as hashes only."""

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
from outrider.wire.settings.config import ContentControlTokens, Positive, location_of, reason
from outrider.wire.settings.files import write_whole

PREFIX = "or-"
"""Text at the start of every API key."""
KEY_BYTES = 32
"""Number of random bytes in an API key."""
MAX_FILE_BYTES = 4 << 20
"""Maximum bytes of the file of keys. The gateway reads the file on its event loop, so a long file would delay
requests."""
HEADING = (
    "# API keys of an Outrider gateway, hashed. Written by `outrider keys`; docs/keys.md says what the fields mean.\n"
)


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C if it is installed, otherwise the one in Python. The one in C is ten times as fast, and the
gateway reads the file on its event loop."""


def _in_utc(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        return moment.replace(tzinfo=UTC)
    return moment


class ApiKey(BaseModel):
    """An API key as the file of keys has it: the key's hash and its limits. A limit that is absent does not apply."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the key's holder. Logs, metrics and errors show it in place of the key."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key, in hexadecimal."""
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    """Maximum number of tokens per minute, prompts and outputs together."""
    max_concurrent: Positive | None = None
    """Maximum number of choices that run or wait at the same time."""
    weight: Annotated[float, Field(ge=WEIGHT.low, le=WEIGHT.high)] = 1.0
    """Weight of the key when several keys compete: a key of weight 2 is served twice as many tokens as one of weight 1.
    """
    control_tokens_in_content: ContentControlTokens = "allow"
    """How texts that look like control tokens are read in this key's chats. text = as plain text, whatever the
    gateway's setting says; allow = as the gateway's setting control_tokens_in_content says."""
    expires: Annotated[datetime, AfterValidator(_in_utc)] | None = None
    """Time from which the key is refused, in UTC if it has no time zone; absent = never."""


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[ApiKey, ...]


def new_key() -> str:
    """Return a new API key with 256 random bits. The key itself is not stored anywhere, so show it to the user now."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> str:
    """Return the SHA-256 of an API key, in hexadecimal. A slow hash is not needed, since a key of 256 random bits
    cannot be guessed.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """Read API keys from a YAML or JSON file {"keys": [...]}. Raises ConfigError with file, line, entry and fault."""
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
        location = location_of(first) or "the file"
        line = _line_of(first["loc"], data)
        raise ConfigError(f"api_keys: {path}, line {line}: {location}: {reason(first)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or no such date
        mark = getattr(error, "problem_mark", None)  # not the error's own message, which quotes the file
        line_text = ""
        if mark is not None:
            line_text = f", line {min(mark.line + 1, len(data.splitlines()))}"
        raise ConfigError(f"api_keys: {path} is neither YAML nor JSON{line_text}") from None
    for field in ("name", "sha256"):
        seen: set[str] = set()
        for key in found.keys:
            if getattr(key, field) in seen:
                raise ConfigError(f"api_keys: {path} has two keys of the {field} of {key.name!r}; keep one")
            seen.add(getattr(key, field))
    return found.keys


def _line_of(location: tuple[int | str, ...], data: bytes) -> int:
    # From 1: ("keys", 0, "name") is on the line of that value, or of the entry in which it is missing.
    node = yaml.compose(data, Loader=_LOADER)
    for part in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
        elif isinstance(node, yaml.MappingNode):
            node = _value_of(node, part)
    if node is None:
        return 1
    return int(node.start_mark.line) + 1


def _value_of(node: yaml.MappingNode, name: int | str) -> Any:
    for key, value in node.value:
        if key.value == name:
            return value
    return node


def write_keys(path: str | Path, keys: tuple[ApiKey, ...]) -> None:
    """Write the file of API keys. If that fails, raise ConfigError and leave the file as it was. A new file can be read
    by its owner only; a file that is replaced keeps its owner and mode.
    """
    entries = list[dict[str, Any]]()
    for key in keys:
        entries.append(key.model_dump(mode="json", exclude_none=True, exclude_defaults=True))
    text = HEADING + yaml.safe_dump({"keys": entries}, sort_keys=False)
    write_whole(path, text.encode(), private=True)
