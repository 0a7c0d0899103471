"""Errors of the engine that a caller handles by taking another way."""


class PathUnavailable(Exception):
    """Raised when a path cannot run this model here; the message says why, in a few words."""
