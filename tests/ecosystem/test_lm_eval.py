"""lm-eval gives our server the scores that it gives transformers: `local-completions` against `hf`, both in fp32.

Nothing is downloaded: the tasks and their items are in lm_eval_tasks, and the model is the one that is served, its
quantized weights read as fp32 numbers.
"""

from __future__ import annotations

import gc
import importlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.conftest import Served, octavo_python

TASKS = Path(__file__).with_name("lm_eval_tasks")
FACTS, SENTENCES = "octavo_facts", "octavo_sentences"
NUM_ITEMS = 32
# Of a sum over some twenty tokens.
LOGLIKELIHOOD_TOLERANCE = 1e-2

_FIND_MODEL = """
from octavo_worker.loaders.source import INSTALLED_MODELS, find_model
print(find_model(next(iter(INSTALLED_MODELS))).path)
"""
Json = dict[str, Any]

for _name in ("lm_eval", "transformers", "gguf"):
    pytest.importorskip(_name, reason="needs the packages of requirements-heavy.txt: make test-ecosystem-heavy")


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    """No hub is asked, and the tasks find their data, which they name relative to the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.chdir(TASKS)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model as transformers reads it."""
    import tokenizers
    import torch
    import transformers

    done = subprocess.run([octavo_python(), "-c", _FIND_MODEL], capture_output=True, text=True, check=True)
    gguf = Path(done.stdout.strip())
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # "smollm" among GGUF's pre-tokenizers: every digit stands alone. transformers' reader leaves that out.
    tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    quantization = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=quantization
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def evaluate(model: str, model_args: Json, batch_size: int) -> Json:
    """Metrics and, by item, the log-likelihoods of both tasks."""
    lm_eval = importlib.import_module("lm_eval")
    tasks = importlib.import_module("lm_eval.tasks")
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=[FACTS, SENTENCES],
        task_manager=tasks.TaskManager(include_path=str(TASKS), include_defaults=False),
        batch_size=batch_size,
        bootstrap_iters=0,
        log_samples=True,
    )
    return {name: {"metrics": _metrics(found, name), "items": _items(found, name)} for name in (FACTS, SENTENCES)}


def _metrics(found: Json, name: str) -> dict[str, float]:
    values = {key.partition(",")[0]: value for key, value in found["results"][name].items()}
    return {key: value for key, value in values.items() if isinstance(value, float) and "stderr" not in key}


def _items(found: Json, name: str) -> list[list[float]]:
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [[_number(response) for response in sample["resps"]] for sample in samples]


def _number(response: Any) -> float:
    """A response is a log-likelihood, or one and whether it was the likeliest, in lists of one."""
    while isinstance(response, list | tuple):
        response = response[0]
    return float(response)


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> Json:
    """By transformers, one item at a time: padding a batch would move the last digits."""
    model_args = {"pretrained": str(checkpoint), "dtype": "float32", "device": "cpu"}
    found = evaluate("hf", model_args, batch_size=1)
    gc.collect()
    return found


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tokenized", [True, False])
def test_scores_are_those_of_transformers(server: Served, checkpoint: Path, theirs: Json, tokenized: bool) -> None:
    """Prompts as token ids, in batches, and as text."""
    ours = evaluate(
        "local-completions",
        {
            "model": "SmolLM2-135M-Instruct",
            "tokenizer": str(checkpoint),
            "tokenizer_backend": "huggingface",
            "base_url": f"{server.http}/v1/completions",
            "tokenized_requests": tokenized,
            "num_concurrent": 2,
        },
        batch_size=4 if tokenized else 1,
    )
    assert ours[FACTS]["metrics"] == theirs[FACTS]["metrics"]
    assert ours[FACTS]["metrics"]["acc"] > 0.6, "chance is 0.25"
    assert ours[SENTENCES]["metrics"] == pytest.approx(theirs[SENTENCES]["metrics"], rel=1e-3)
    for task, expected in theirs.items():
        assert len(expected["items"]) == NUM_ITEMS
        for our_item, their_item in zip(ours[task]["items"], expected["items"], strict=True):
            assert our_item == pytest.approx(their_item, abs=LOGLIKELIHOOD_TOLERANCE)
