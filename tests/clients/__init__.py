"""Client libraries against the demo system: `make clients`. They are installed apart, under .work/clients."""
