"""`outrider demo`: the demo pair, started, asked and compared with plain decoding."""
