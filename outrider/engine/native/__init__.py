"""The C++ forward and its binding: compiled on first use, kept in a cache folder. Used by `paths.fused`."""
