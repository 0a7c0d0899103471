"""API keys and certificates."""
