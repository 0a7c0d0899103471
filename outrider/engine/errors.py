"""The error by which an attention path refuses a model. The caller then tries the next path."""


class PathUnavailable(Exception):
    """Raised when a path cannot run this model here; the message is the reason, in a few words."""
