"""Load a model: from a folder, GGUF file or hub id to a `ModelRunner` whose attention path passed the self-test.

May import the rest of the engine except heads and drafters. Start at `loader.py` (`load_runner`), which checks the
files, reads the weights and sizes the KV cache; `loaded.py` wraps the result for a worker.
"""
