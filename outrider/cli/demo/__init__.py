"""`outrider demo`: starts the demo pair, shows three ways to draft and compares them with plain decoding.

`demo.py` is the command, `demo_parts.py` has the prompts, `demo_runs.py` measures.
"""
