"""Settings: of each service, of a whole system, and of its API keys."""
