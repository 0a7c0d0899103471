"""The gateway: serves HTTP and gRPC, owns requests, and coordinates targets and drafts. It must not import torch.

`api` translates OpenAI's and Anthropic's HTTP APIs and GenerationService (gRPC), `admission` checks requests, `rounds`
runs them, `workers` keeps the workers connected. Start at `__main__.py` for the process, and at `coordinator.py` for
the way of a request.
"""
