"""Holds calls and their grammars to what chat templates write: `make tool-forms`."""
