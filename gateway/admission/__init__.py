"""Admission of requests: API keys, limits, held bytes, the queue, and the checks of a request."""
