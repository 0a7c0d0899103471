"""The Helm chart, rendered and checked without a cluster."""
