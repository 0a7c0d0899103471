"""What `outrider bench` is made of: a load over HTTP, its figures, and how they are shown."""
