"""The draft worker: proposes tokens and sends them, with the laws they were drawn from, to the target directly."""
