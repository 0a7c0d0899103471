"""The error by which an attention path refuses a model. The next path is then tried."""


class PathUnavailable(Exception):
    """Raised if an attention path cannot run this model on this device or machine; the message is the reason."""
