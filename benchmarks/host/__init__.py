"""What the host costs: CPU time of each process beside the models' forwards. `python -m benchmarks.host`."""
