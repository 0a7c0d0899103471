"""The workers: links, membership, pools, health, placement, and the models they serve."""
