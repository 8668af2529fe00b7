"""Writes what the worker's tests compare with, into tests/worker/data: made with transformers and the gguf package.

    logits.npz           fp32 logits of tiny models (tests/worker/checkpoints.py), one for each thing a decoder does
    gguf_blocks.npz      blocks of every GGUF type and their values
    tokenizer_cases.json token ids of texts under vocabularies that are read from GGUF files

Run it in the environment that README.md beside this file describes, from the root of the repository:

    python tests/references/make_worker_references.py --gguf PATH/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.worker.cases import MODEL_CASES, PROMPT, TEXTS, VOCABULARIES, gguf_case, plain_vocabulary  # noqa: E402
from tests.worker.checkpoints import (  # noqa: E402
    gguf_metadata,
    gguf_tensors,
    tiny_config,
    tiny_weights,
    write_checkpoint,
    write_gguf,
)

DATA = ROOT / "tests" / "worker" / "data"


def logits_of(folder: Path, **options: Any) -> np.ndarray:
    """transformers' logits of the prompt's last two tokens, (2, vocab) fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, -2:].float().numpy()


def make_logits() -> None:
    answers = {}
    for name, config in MODEL_CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            answers[name] = logits_of(write_checkpoint(Path(folder), config))
    np.savez_compressed(DATA / "logits.npz", **answers)


def check_gguf_logits() -> None:
    """transformers must read our GGUF files as we write them; the tests then compare with the safetensors' logits."""
    expected = np.load(DATA / "logits.npz")
    for family in ("llama", "qwen2"):  # of a qwen3 GGUF transformers takes no head size but 128
        config = gguf_case(family)
        with tempfile.TemporaryDirectory() as folder:
            metadata = gguf_metadata(config) | plain_vocabulary(config["vocab_size"])
            write_gguf(Path(folder) / "m.gguf", metadata, gguf_tensors(config, tiny_weights(config)))
            real = logits_of(Path(folder), gguf_file="m.gguf")
        worst = np.abs(real - expected[f"gguf-{family}"]).max()
        print(f"GGUF {family}: {worst:.2e} from the safetensors' logits")
        assert worst < 1e-4


def make_blocks() -> None:
    random = np.random.RandomState(0)
    content: dict[str, np.ndarray] = {}
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.randint(0, 256, (3 if elements > 1 else 64, size)).astype(np.uint8)
        scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0, 2))
        for at in scales if elements > 1 else ():
            if name in ("Q4_0", "Q5_0", "Q8_0") and at:
                continue
            blocks[:, at : at + 2] = random.uniform(-1, 1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
        if elements == 1:
            values = random.standard_normal(64).astype(np.float32)
            blocks = {
                "F32": values.view(np.uint8),
                "F16": values.astype(np.float16).view(np.uint8),
                "BF16": (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
            }[name].reshape(64, -1)
        content[f"{name}.bytes"] = blocks.reshape(-1)
        content[f"{name}.values"] = gguf.quants.dequantize(blocks.reshape(1, -1), kind).astype(np.float32).reshape(-1)
    np.savez_compressed(DATA / "gguf_blocks.npz", **content)


def make_tokenizer_cases(model: Path) -> None:
    answers: dict[str, Any] = {}
    for name, metadata_of in VOCABULARIES.items():
        with tempfile.TemporaryDirectory() as folder:
            config = tiny_config()
            metadata = gguf_metadata(config) | metadata_of(model)
            write_gguf(Path(folder) / "m.gguf", metadata, gguf_tensors(config, tiny_weights(config)))
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="m.gguf")
            if name == "smollm":  # transformers' reader leaves out that every digit stands alone
                tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
                )
            answers[name] = [tokenizer.encode(text) for text in TEXTS]
    (DATA / "tokenizer_cases.json").write_text(json.dumps(answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the default model's file")
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    make_logits()
    make_blocks()
    make_tokenizer_cases(arguments.gguf)
    check_gguf_logits()


if __name__ == "__main__":
    main()
