"""A rolling replacement of gateways under streams and kept connections, behind a TCP balancer."""
