"""Types of fields that several bodies share: how their values are read, and their JSON schema."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gateway.admission.request_checks import MAX_STOP_CHARS
from outrider.wire.requests.params import MAX_LOGIT_BIAS, Range

SEED = Range(-(2**63), 2**64 - 1)
"""Range of allowed seeds. They may be negative, because OpenAI's seeds are signed."""
TOKEN_ID = "^(0|[1-9][0-9]{0,9})$"
"""Regular expression for a key of `logit_bias`: a token id without leading zeros, such as 3, not 03."""


def read_strings(value: Any) -> list[str]:
    """Return a list of strings unchanged, or a string as a list of one. Raises ValueError for any other value."""
    if isinstance(value, str):
        return [value]
    if not is_list_of(value, str):
        raise ValueError("must be a string or a list of strings")
    strings: list[str] = value
    return strings


def is_list_of(value: Any, kind: type) -> bool:
    """Return whether `value` is a list whose items all have exactly the type `kind`. True, for example, is no int."""
    return isinstance(value, list) and all(type(item) is kind for item in value)


def check_biases(value: Any) -> Any:
    """Return the value of `logit_bias` unchanged. Raises ValueError if it has more than MAX_LOGIT_BIAS entries.

    Without this check pydantic would create an error for each entry.
    """
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    return value


def check_early_stopping(value: Any) -> Any:
    """Return the value of `early_stopping` unchanged. Raises ValueError unless it is None, true, false or "never"."""
    if value is not None and type(value) is not bool and value != "never":
        raise ValueError("must be true, false or never")
    return value


Text = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Strings = Annotated[list[str], BeforeValidator(read_strings, json_schema_input_type=Text | list[Text])]
LogitBias = Annotated[dict[str, float], BeforeValidator(check_biases), Field(max_length=MAX_LOGIT_BIAS)]
