"""gRPC as all parts use it: channels, streams, TLS, servers, addresses, and tensors as bytes."""
