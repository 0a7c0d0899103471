"""The attention backends: how a forward stores and reads keys and values. Imports nothing above it but native code.

Start at `forward_path.py`, which says what a backend is.
"""
