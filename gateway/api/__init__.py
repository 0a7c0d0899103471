"""The front ends of the gateway: OpenAI's, Anthropic's and vLLM's APIs over HTTP, and GenerationService over gRPC.

A front end turns a request into an `UncheckedRequest` (`gateway.admission`), and the outputs of its choices into an
answer. `app.py` assembles the HTTP application; a request then runs through `routes.py`, `request_body.py`, `schemas`,
and `openai_answers.py` or `forms`. `grpc_api.py` is the whole front end of gRPC. May import every other folder of the
gateway; none imports this one. Start at `app.py`.
"""
