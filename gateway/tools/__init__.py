"""Tools and reasoning of chats: which tools a request offers, the grammar of its outputs, and the reader of their text.

No I/O, and nothing of HTTP. Imports `outrider.wire` and, of the gateway, the tokenizer and `gateway.grammars`. Start at
`offer.py` (what the model may call) and `call_families.py` (how models write calls); `reading.py` puts both together
for one prompt.
"""
