"""The Kubernetes manifests, built and checked without a cluster."""
