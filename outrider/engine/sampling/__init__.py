"""From logits to tokens: grammar and penalties, distributions, random numbers, and the acceptance rules.

Both workers use it. It imports `outrider.wire` and the engine's lowest files, and neither a model nor a cache. Start at
`acceptance.py` (which draft tokens are accepted) or `sampling.py` (distributions of a batch on a device; on a CPU
`host_sampling.py`). `penalties.py` and `grammar.py` change logits, `noise.py` and `coupled.py` have the random numbers,
`row_law.py` is a distribution on the host, and `wire_tensors.py` its bytes.
"""
