"""Files of a model: its config, weights, tokenizer and stop tokens, as transformers or GGUF stores them.

Imports nothing else of the engine.
"""
