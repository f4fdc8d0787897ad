"""python -m gft: the same as the gft command."""

from gft.cli import main

if __name__ == "__main__":
    main()
