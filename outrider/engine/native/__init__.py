"""The C++ forward and its binding, compiled on first use and kept in a cache folder. Used by `paths.fused`."""
