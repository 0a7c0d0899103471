"""POST /v1/responses and /v1/messages, from request to response. Both are layers over chat: each runs one chat.

A body (`responses_schemas.py`, `messages_schemas.py`) becomes the UncheckedRequest of one chat. A writer
(`responses_writer.py`, `messages_writer.py`) writes the outputs of that chat as a response or as events; it does no
I/O. May import `gateway.api.schemas` and the modules of `gateway.api` that write responses, but no routes. Start at
`layer_answer.py`.
"""
