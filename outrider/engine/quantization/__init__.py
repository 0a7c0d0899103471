"""Quantised weights: which methods are read, how they are unpacked, and 8-bit layers of our own.

Start at `quantize.py`.
"""
