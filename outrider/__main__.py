"""`python -m outrider`."""

from outrider.cli.__main__ import main

if __name__ == "__main__":
    main()
