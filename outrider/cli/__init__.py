"""The command line. `main` is its entry; each command has its own file."""
