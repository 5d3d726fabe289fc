"""``python -m streamiter``: the same as the program ``streamiter``."""

from streamiter.cli import main

if __name__ == "__main__":
    main()
