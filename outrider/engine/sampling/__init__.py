"""The laws: sampling, penalties, noise, and what is accepted of a proposal."""
