"""Which files one request goes through, in order: traced, and held against docs/architecture.md."""
