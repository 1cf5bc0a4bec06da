"""``python -m fp8ref`` is the command ``fp8ref``."""

from fp8ref.cli import main

if __name__ == "__main__":
    main()
