"""Turn a model's folder into a runner: files, weights, quantisation, memory, and the self-test."""
