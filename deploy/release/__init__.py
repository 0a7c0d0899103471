"""What `make release` makes of a commit."""
