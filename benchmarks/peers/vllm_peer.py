"""vLLM's CPU build, as a peer: eager, in this process, without a tokenizer.

It does not read GGUF files on a CPU, so the model is saved once as a checkpoint in the data type asked for, beside the
environment's packages. Its compiled mode is not used: it gave wrong text on the machines that were tried.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from protocol import Peer, Prompts, serve

MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 64
CACHE_GIB = 2


def checkpoint(path: Path, dtype: str) -> Path:
    """A folder that vLLM reads: the path itself, or for a GGUF file what it was saved as, now or before."""
    if path.suffix != ".gguf":
        return path
    folder = Path(sys.prefix) / "models" / f"{path.stem}-{dtype}"
    if not (folder / "config.json").exists():
        from transformers_peer import read_model

        read_model(path, dtype).save_pretrained(folder)
    return folder


def preload_openmp() -> None:
    """Starts this process anew with Intel's OpenMP, which vLLM brings and advises to load before anything else."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists() and "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(library)})


def load(path: Path, dtype: str, threads: int) -> Peer:
    """vLLM with the model loaded; prefixes are not cached."""
    folder = checkpoint(path, dtype)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import torch
    import vllm

    engine = vllm.LLM(
        model=str(folder),
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        disable_log_stats=True,
    )

    def generate(prompts: Prompts, num_tokens: int) -> int:
        params = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = engine.generate(inputs, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    versions = {"torch": torch.__version__, "vllm": vllm.__version__}
    return Peer("vllm", versions, f"{dtype}, eager", generate)


if __name__ == "__main__":
    preload_openmp()
    serve(__doc__, load)
