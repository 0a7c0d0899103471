"""Graphs, and copies beside the running work, for a GPU. Everything here also runs, plainly, without one."""
