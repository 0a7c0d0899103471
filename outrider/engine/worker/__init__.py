"""The parts that both workers share: the engine thread, its jobs, slots and scheduler, and the gRPC service."""
