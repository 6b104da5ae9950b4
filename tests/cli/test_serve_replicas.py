"""Two servers behind the nginx of docs/serve.md."""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import NUM_TOKENS, free_port, running_server, save_letters, wait_for
from test_serve import save_memory

NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]


def test_two_servers_behind_nginx(tmp_path):
    """Servers that share a memory answer alike. Users are spread over them, each comes back to the same one, and is
    answered by the other one once it has ended.
    """
    save_letters(tmp_path / "model", "mag")
    save_memory(tmp_path / "model", tmp_path / "memory")
    homes = [tmp_path / "a", tmp_path / "b"]
    for home in homes:
        home.mkdir()
    options = (tmp_path / "model", "--memory", tmp_path / "memory")
    with (
        running_server(options[0], homes[0], *map(str, options[1:])) as (first, process),
        running_server(options[0], homes[1], *map(str, options[1:])) as (second, _),
    ):
        url = f"http://127.0.0.1:{(port := free_port())}"
        text = re.search(r"^# nginx .*?^}$", PAGE.read_text(), re.DOTALL | re.MULTILINE).group()
        for address, new in (("localhost:8001", first[7:]), ("localhost:8002", second[7:]), ("8000;", f"{port};")):
            assert address in text
            text = text.replace(address, new)
        folders = "".join(f"  {x}_temp_path {x};\n" for x in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        (tmp_path / "nginx.conf").write_text(text.replace("http {\n", "http {\n  access_log off;\n" + folders))
        command = [NGINX, "-p", str(tmp_path), "-c", "nginx.conf", "-e", "stderr", "-g", "daemon off; pid nginx.pid;"]
        with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as nginx:
            try:
                wait_for(url, nginx, tmp_path / "log")
                ask_through(url, tmp_path / "model", homes, process)
            finally:
                nginx.terminate()


def ask_through(url, checkpoint, homes, process) -> None:
    """Asks as several users, twice, and again after the first server has ended."""

    def answer(user: int) -> str:
        body = {"model": str(checkpoint), "prompt": "It was a dark night, and " * 3, "max_tokens": NUM_TOKENS}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {user}"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)["choices"][0]["text"]

    with ThreadPoolExecutor(16) as users:
        answers = [list(users.map(answer, range(16))) for _ in range(2)]
        assert len({*answers[0], *answers[1]}) == 1
        logs = [(home / "log").read_text() for home in homes]
        received = [log.count("[Request received]") for log in logs]
        assert sum(received) == 32 and all(received)
        for log, number in zip(logs, received, strict=True):  # of each user's requests, the first found no snapshot
            assert log.count("[Snapshot] 0 of") == number / 2
        process.terminate()
        process.wait()
        assert list(users.map(answer, range(16))) == answers[0]
