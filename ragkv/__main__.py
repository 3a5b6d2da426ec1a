"""`python -m ragkv`."""

from ragkv.cli import main

if __name__ == "__main__":
    main()
