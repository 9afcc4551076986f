"""`python -m tacit`: the command line, where it is not on the path."""

from __future__ import annotations

from tacit.cli import main

if __name__ == "__main__":
    main()
