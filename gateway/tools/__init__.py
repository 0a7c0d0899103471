"""Tools and reasoning: what a request offers, how a model's family writes calls, and how answers are read."""
