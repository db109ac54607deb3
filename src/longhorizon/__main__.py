"""`python -m longhorizon` is the command `longhorizon`."""

from longhorizon.cli import main

if __name__ == "__main__":
    main()
