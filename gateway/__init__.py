"""The coordinator: owns requests, runs rounds, speaks OpenAI over HTTP and GenerationService over gRPC. No torch."""
