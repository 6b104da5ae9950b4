"""Runs `titans-hf demo`: python scripts/demo.py [options]"""

from titans_hf.cli.demo import main
from titans_hf.cli.shared.command_line import run_command

if __name__ == "__main__":
    run_command(main)
