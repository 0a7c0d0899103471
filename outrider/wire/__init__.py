"""Shared code without torch: configuration, errors, parameters, codec, streams, metrics, logging."""
