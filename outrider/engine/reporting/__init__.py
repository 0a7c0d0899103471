"""What `outrider report` finds out where torch is: devices, laws of sampling, a model's load and its steps."""
