"""What differs between model architectures: text parts, layer memory, context and positions.

Imports `files` only.
"""
