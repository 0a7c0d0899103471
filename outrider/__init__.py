"""Outrider: disaggregated speculative decoding. See docs/architecture.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.client.llm import LLM as LLM

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what is asked for by name, so that who asks for nothing has nothing to import."""
    if name == "LLM":
        from outrider.client.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
