"""Work that a request asks for and that could take any time or memory, in processes that can be ended.

`pool.py` runs pieces of work, `process.py` is the process that does them, and `child.py` the pool's end of it. There
are two modules of work: `templates.py`, which renders chat templates, and `gateway.grammar_work`. `template_shape.py`
and `template_messages.py` adapt messages to a template. Imports `outrider.wire` alone, so that a process starts fast.
Start at `pool.py`.
"""
