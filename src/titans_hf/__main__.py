"""Runs the command `titans-hf`: `python -m titans_hf train ...`."""

from titans_hf_console import main

if __name__ == "__main__":
    main()
