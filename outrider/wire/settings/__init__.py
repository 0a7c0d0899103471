"""Settings: of each process (`config`), of a whole system (`system`, `pools`, `gpu_shares`), and of API keys
(`api_keys`).

May import `outrider.wire` and pydantic. Start at `config`, whose docstrings are what `--help` and docs show.
"""
