"""The target worker: verifies proposals in one forward and decides what is committed."""
