"""`python -m longhorizon`: the command line."""

from longhorizon.cli import main

if __name__ == "__main__":
    main()
