"""The layers over chat: POST /v1/responses and /v1/messages, from their bodies to their answers.

A body (`responses_schemas.py`, `messages_schemas.py`) becomes the UncheckedRequest of one chat. A form
(`responses_form.py`, `messages_form.py`) writes the outputs of that chat as an answer or as events; it does no I/O.
Imports `gateway.api.schemas` and the modules of `gateway.api` that write answers, but no routes. Start at `layers.py`.
"""
