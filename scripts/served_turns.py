"""Measures how long the turns of a chat take on a server, by the length of the text that the chat began with; and how
many tokens it makes for several clients at once.

python -m scripts.served_turns --lengths 1000 4000 --clients 1 8 -- titans-hf serve my-adapter --device cpu --port 8000

The command after `--` starts the server; the model is the argument after `serve`. Prints the rows of a table: tokens of
the first prompt; for the first turn, which reads the text, and for the second, a short question, the processor seconds
of the server and the seconds that the client waits. An answer has 8 tokens. For clients: their number, tokens of all
answers, and tokens by processor second.
"""

import argparse
import json
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

from titans_hf.cli.shared.command_line import run_command

SENTENCE = "The captain of ship {} sailed on over the sea, and nobody knew where. "
WORDS = 15  # tokens of a sentence, about; the exact number is in the server's answer


def main() -> None:
    """Prints the table of a server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[], help="tokens of the text")
    parser.add_argument("--clients", type=int, nargs="*", default=[], help="that ask at once, 64 tokens each")
    parser.add_argument("command", nargs="+", help="starts the server")
    arguments = parser.parse_args()
    command = arguments.command
    model, port = (command[command.index(name) + 1] for name in ("serve", "--port"))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            url = f"http://localhost:{port}"
            wait_for(url, server)
            ask(url, model, [user("Hello.")])
            for length in arguments.lengths:
                tokens, *turns = measure(url, model, length, psutil.Process(server.pid))
                seconds = " | ".join(f"{x:.2f}" for turn in turns for x in turn)
                print(f"| {' '.join(command)} | {tokens:,} | {seconds} |", flush=True)
            for number in arguments.clients:
                tokens, seconds = measure_clients(url, model, number, psutil.Process(server.pid))
                print(f"| {' '.join(command)} | {number} | {tokens:,} | {tokens / seconds:.1f} |", flush=True)
        finally:
            server.terminate()


def wait_for(url: str, server: subprocess.Popen) -> None:
    """Returns once the server answers. Raises ValueError if it ends before."""
    while True:
        try:
            return urllib.request.urlopen(f"{url}/health").close()
        except OSError as error:
            if server.poll() is not None:
                raise ValueError("the server has ended: run its command alone to see why") from error
            time.sleep(0.2)


def user(text: str) -> dict:
    """Returns a message of the user."""
    return {"role": "user", "content": text}


def measure(url: str, model: str, length: int, server: psutil.Process) -> tuple[int, np.ndarray, np.ndarray]:
    """Returns the tokens of the first prompt; and for the first and the second turn, the processor seconds of the
    server and the seconds until the answer (2,).
    """
    text = "".join(SENTENCE.format(length + number) for number in range(length // WORDS))
    messages, tokens, times = [user(text)], [], [spent(server)]
    for _ in range(2):
        answer = ask(url, model, messages)
        times.append(spent(server))
        tokens.append(answer["usage"]["prompt_tokens"])
        messages += [answer["choices"][0]["message"], user("And then?")]
    return tokens[0], *np.diff(times, axis=0)


def spent(server: psutil.Process) -> tuple[float, float]:
    """Returns the processor seconds of the server so far, and the time."""
    return sum(server.cpu_times()[:2]), time.perf_counter()


def measure_clients(url: str, model: str, number: int, server: psutil.Process) -> tuple[int, float]:
    """Returns the tokens of all answers to clients that ask at once, and the processor seconds of the server."""
    before = spent(server)[0]
    messages = [[user(f"Tell me the long story of ship {i}.")] for i in range(number)]
    with ThreadPoolExecutor(number) as clients:
        answers = list(clients.map(lambda given: ask(url, model, given, 64), messages))
    return sum(x["usage"]["completion_tokens"] for x in answers), spent(server)[0] - before


def ask(url: str, model: str, messages: list[dict], max_tokens: int = 8) -> dict:
    """Returns the answer of the server."""
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


if __name__ == "__main__":
    run_command(main)
