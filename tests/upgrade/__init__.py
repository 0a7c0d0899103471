"""A fleet of an earlier commit, replaced by this one's under streams: `make upgrade-test`."""
