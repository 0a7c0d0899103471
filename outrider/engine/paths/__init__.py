"""Ways to run a forward. `choice` picks the first that passes the self-test: fused, flash, paged, dense."""
