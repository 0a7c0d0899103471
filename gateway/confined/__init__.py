"""Work on callers' input that could take any time or memory, in processes that can be ended.

`pool.py` distributes the work, `process.py` is the process that does it, and `child.py` is how the pool talks to one.
There are two modules of work: `templates.py`, which renders chat templates, and `gateway.grammar_work`.
`template_shape.py` and `template_messages.py` adapt messages to a template. May import only `outrider.wire`, so that a
process starts fast. Start at `pool.py`.
"""
