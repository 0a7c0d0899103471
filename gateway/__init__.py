"""The coordinator: owns requests and runs rounds. No torch.

It serves OpenAI's API over HTTP and GenerationService over gRPC.
"""
