"""Read the files of a model: configuration, weight headers, tokenizer and end tokens, from a folder, a GGUF file or the
hub.

Imports nothing else of the engine. Start at `model_files.py`, which finds the files and limits their size.
"""
