"""From logits to tokens: grammar and penalties, distributions, random numbers, and the acceptance rules.

Both workers use it. It imports `outrider.wire` and the engine's lowest files, and neither a model nor a cache. Start at
`acceptance.py` (which draft tokens are accepted) or `device_sampling.py` (distributions of a batch on a device; on a
CPU `host_sampling.py`). `penalties.py` and `grammar_state.py` change logits, `noise.py` and `coupled.py` have the
random numbers, `token_distribution.py` is a distribution on the host, and `wire_tensors.py` turns it into bytes and
back.
"""
