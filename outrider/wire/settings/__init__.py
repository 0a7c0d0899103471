"""Settings: of each process (`config`), of a whole system (`system`, `pools`), and of API keys (`api_keys`).

`cores` and `gpu_shares` divide a machine among workers, `variables` checks names in the environment. May import
`outrider.wire` and pydantic. Start at `config`, whose docstrings are what `--help` and docs show.
"""
