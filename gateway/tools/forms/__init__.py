"""The forms in which models write one call: a JSON object, JSON behind a name, XML parameters, Python, Gemma's own.

A form reads a call as it is generated and writes the grammar of one. It may import `gateway.tools.cursor` and
`gateway.tools.parts`. Start with `form.py`; `json_arguments.py` is the shortest.
"""
