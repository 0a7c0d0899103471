"""Outrider: disaggregated speculative decoding. See docs/architecture.md.

Users import `LLM` from here and everything else from `outrider.client`. Importing this package imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.client.llm import LLM as LLM

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # LLM is imported at its first use: the client imports gRPC, which workers that import outrider do without.
    if name == "LLM":
        from outrider.client.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
