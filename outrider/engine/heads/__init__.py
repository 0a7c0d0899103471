"""Draft heads: modules that read a target's hidden states, their files, and the path that runs one like a model."""
