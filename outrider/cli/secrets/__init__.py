"""`outrider keys` and `outrider certs`: make API keys, and certificates for TLS (`authority.py`)."""
