"""Outrider: disaggregated speculative decoding. See docs/architecture.md."""

__version__ = "0.1.0"
