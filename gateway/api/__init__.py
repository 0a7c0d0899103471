"""The front ends: OpenAI's API over HTTP and GenerationService over gRPC, translated to a `Demand` and back."""
