"""`outrider keys` and `outrider certs`: they make API keys, and certificates for TLS (`authority.py`)."""
