"""aiperf and guidellm as they are, with readers that leave in mid-stream: no request fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.conftest import Served, octavo_python

MODEL = "SmolLM2-135M-Instruct"
REVISION = "0" * 40

# What these programs count tokens with: the served model's tokenizer, in the layout of Hugging Face's cache.
_WRITE_TOKENIZER = """
import json, sys
from pathlib import Path
from octavo_worker.loaders.gguf import GGUFFile
from octavo_worker.loaders.source import find_model
from octavo_worker.tokenizer import bundle_from_gguf

bundle = bundle_from_gguf(GGUFFile(find_model(sys.argv[1]).path))
folder = Path(sys.argv[2])
settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": bundle.defaults.chat_template}
for name in ("bos_token", "eos_token"):
    settings[name] = getattr(bundle.defaults, name)
(folder / "tokenizer.json").write_bytes(bundle.tokenizer_json)
(folder / "tokenizer_config.json").write_text(json.dumps(settings))
(folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of Hugging Face's that holds the tokenizer as octavo/tokenizer."""
    root = tmp_path_factory.mktemp("cache")
    model = root / "hub" / "models--octavo--tokenizer"
    (model / "snapshots" / REVISION).mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    command = [octavo_python(), "-c", _WRITE_TOKENIZER, MODEL, str(model / "snapshots" / REVISION)]
    subprocess.run(command, check=True)
    return root


def _run(command: list[str], cache: Path) -> None:
    environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def _program(name: str) -> str:
    program = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"{name} is not installed here; `make test-ecosystem-heavy` has it")
    return program


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(server: Served, cache: Path, tmp_path: Path, endpoint: str) -> None:
    command = [_program("aiperf"), "profile", "--model", MODEL, "--url", server.http, "--endpoint-type", endpoint]
    command += ["--streaming", "--tokenizer", "octavo/tokenizer", "--request-count=40", "--concurrency=8"]
    command += ["--isl=64", "--osl=24", "--request-cancellation-rate=20", "--request-cancellation-delay=0.2"]
    _run([*command, "--ui=none", f"--output-artifact-dir={tmp_path}"], cache)
    report: dict[str, Any] = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    kinds = {error["error_details"]["type"] for error in report["error_summary"]}
    assert kinds <= {"RequestCancellationError"}, report["error_summary"]
    assert report["completed_request_count"]["avg"] == 40


def test_guidellm(server: Served, cache: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    tokenizer = cache / "hub" / "models--octavo--tokenizer" / "snapshots" / REVISION
    command = [_program("guidellm"), "run", "--backend", f"kind=openai_http,target={server.http},model={MODEL}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=24"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=24"]
    _run([*command, "--output", f"kind=json,path={results}", "--disable-progress"], cache)
    (benchmark,) = json.loads(results.read_text())["benchmarks"]
    assert not benchmark["requests"]["errored"]
    assert len(benchmark["requests"]["successful"]) >= 20
