"""`python -m outrider`, the same as the command `outrider`."""

from outrider.cli.__main__ import main

if __name__ == "__main__":
    main()
