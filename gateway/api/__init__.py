"""The front ends of the gateway: OpenAI's, Anthropic's and vLLM's APIs over HTTP, and GenerationService over gRPC.

A front end turns a request into an `UncheckedRequest` (`gateway.admission`), and the outputs of its choices into a
response. `app.py` assembles the HTTP application. An HTTP request passes through `routes.py`, `request_body.py`,
`schemas`, and `openai_answers.py` or `layers`. `grpc_api.py` is the whole gRPC front end. It may import every other
folder of the gateway; none of them imports this one. Start at `app.py`.
"""
