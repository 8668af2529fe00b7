"""How much of a model's quality the ways to compute it keep: perplexity on a fixed text, and agreement of its choices.

    python benchmarks/perplexity.py [--model PATH] [--text FILE] [--json FILE]

The text is cut into windows, each a prompt of its own. Every mode sees the same tokens, and each token but a window's
first is predicted from those before it. Compared is with fp32 on the same weights, dequantized: perplexity, the share
of positions at which the most likely next token is the same one, and the mean divergence (Kullback-Leibler, in nats) of
the distributions from fp32's. The difference in the mean loss comes with its standard error over windows.

8-bit floats are computed by the reference backend, slowly, where the fastest one has none.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from machine import installed_model
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from octavo.worker.v1 import worker_pb2 as pb
from octavo_kernels import Backend, KVLayout, load_backend
from octavo_kernels.reference import ReferenceBackend
from octavo_worker.batch import build_batch
from octavo_worker.devices import open_device
from octavo_worker.loaders.checkpoint import Checkpoint, open_checkpoint
from octavo_worker.loaders.source import find_model
from octavo_worker.models.decoder import Decoder
from octavo_worker.models.layers import Quantization
from octavo_worker.sequences import SequenceTable

TEXT = Path(__file__).resolve().parent / "data" / "english.txt"
BLOCK_SIZE, CHUNK = 16, 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Mode:
    """A way to compute: dtype of activations, what linear layers compute in, what K and V are kept in ("": dtype)."""

    dtype: str
    quantization: Quantization = "none"
    kv_dtype: str = ""

    @property
    def needs_float8(self) -> bool:
        """Whether e4m3 is in it."""
        return "fp8" in self.quantization + self.kv_dtype

    def __str__(self) -> str:
        quantization = "" if self.quantization == "none" else f", {self.quantization}"
        return f"{self.dtype}{quantization}{f', {self.kv_dtype} KV' if self.kv_dtype else ''}"


BASE = Mode("float32")
MODES = (
    BASE,
    Mode("float32", kv_dtype="int8"),
    Mode("float32", kv_dtype="fp8_e4m3"),
    Mode("bfloat16"),
    Mode("bfloat16", kv_dtype="int8"),
    Mode("bfloat16", "int8"),
    Mode("bfloat16", "int8", kv_dtype="int8"),
    Mode("bfloat16", "int4"),
    Mode("bfloat16", "int4", kv_dtype="int8"),
    Mode("bfloat16", "fp8"),
    Mode("bfloat16", "fp8", kv_dtype="fp8_e4m3"),
)


@dataclass(frozen=True)
class Quality:
    """What one mode keeps. Losses are nats a token; against fp32 where it says so."""

    mode: str
    perplexity: float
    perplexity_over_fp32: float
    loss_difference: float
    loss_difference_error: float
    top_1_agreement: float
    divergence: float
    num_tokens: int
    seconds: float


def logits_of(decoder: Decoder, mode: Mode, backend: Backend, tokens: NDArray[np.int32]) -> Iterator[Tensor]:
    """Logits of every position of one prompt, a chunk of them at a time.

    All K and V that attention reads, those of a chunk's own tokens too, come from the cache, as the mode keeps them.
    """
    model, kv_dtype = decoder.config, KV_DTYPES.get(mode.kv_dtype, decoder.dtype)
    layout = KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, BLOCK_SIZE, kv_dtype)
    blocks = np.arange(-(-len(tokens) // BLOCK_SIZE), dtype=np.int32)
    kv_layers = layout.layers(torch.zeros(layout.pool_shape(len(blocks)), dtype=layout.pool_dtype))
    table = SequenceTable(1)
    row = np.array([table.put(0, tokens, blocks, len(tokens), pb.SequenceParams())])
    device = open_device(backend.device)
    for start in range(0, len(tokens), CHUNK):
        count = min(CHUNK, len(tokens) - start)
        batch = build_batch(
            table,
            row,
            np.array([start]),
            np.array([count]),
            block_size=BLOCK_SIZE,
            upload=device.upload,
            with_prompt_lens=decoder.needs_prompt_lens,
        )
        yield decoder.forward(
            batch.token_ids, batch.attention, kv_layers, torch.arange(count), prompt_lens=batch.prompt_lens
        )


def read_windows(checkpoint: Checkpoint, text: Path, window: int) -> list[NDArray[np.int32]]:
    """The text's tokens in windows of equal length; a shorter rest is left out."""
    tokenizer = Tokenizer.from_buffer(checkpoint.tokenizer.tokenizer_json)
    ids = np.array(tokenizer.encode(text.read_text()).ids, dtype=np.int32)
    return [ids[start : start + window] for start in range(0, len(ids) - window + 1, window)]


def measure(
    checkpoint: Checkpoint, backend: Backend, windows: list[NDArray[np.int32]], modes: list[Mode]
) -> Iterator[Quality]:
    """One mode after another, BASE first. All models stay loaded, so that nothing but a chunk's logits is kept."""
    num_sampled = min(checkpoint.config.vocab_size, checkpoint.tokenizer.size)
    reference = ReferenceBackend()
    backends = [reference if mode.needs_float8 and not backend.has_float8 else backend for mode in modes]
    decoders = {
        (dtype, quantization, backend): Decoder(
            checkpoint.config,
            checkpoint.weights,
            backend,
            DTYPES[dtype],
            num_sampled=num_sampled,
            quantization=quantization,
        )
        for dtype, quantization, backend in {
            (mode.dtype, mode.quantization, used) for mode, used in zip(modes, backends, strict=True)
        }
    }
    losses = np.zeros((len(modes), len(windows)))
    agreed, divergence, seconds = np.zeros(len(modes)), np.zeros(len(modes)), np.zeros(len(modes))
    for index, tokens in enumerate(windows):
        targets = torch.from_numpy(tokens[1:].astype(np.int64))
        position = 0
        streams = [
            logits_of(decoders[mode.dtype, mode.quantization, used], mode, used, tokens)
            for mode, used in zip(modes, backends, strict=True)
        ]
        while position < len(targets):
            expected: Tensor | None = None
            for column, stream in enumerate(streams):
                started = time.perf_counter()
                logits = next(stream)
                seconds[column] += time.perf_counter() - started
                wanted = targets[position : position + len(logits)]
                logprobs = logits[: len(wanted)].log_softmax(dim=-1)
                losses[column, index] -= logprobs.gather(1, wanted[:, None]).sum().item()
                if expected is None:
                    expected = logprobs
                agreed[column] += (logprobs.argmax(1) == expected.argmax(1)).sum().item()
                divergence[column] += (expected.exp() * (expected - logprobs)).sum().item()
            position += CHUNK
        print(f"window {index + 1} of {len(windows)}", end="\r", flush=True)
    num_tokens = sum(len(tokens) - 1 for tokens in windows)
    differences = (losses - losses[0]) / (num_tokens / len(windows))
    for column, mode in enumerate(modes):
        yield Quality(
            mode=str(mode),
            perplexity=math.exp(losses[column].sum() / num_tokens),
            perplexity_over_fp32=math.exp((losses[column] - losses[0]).sum() / num_tokens),
            loss_difference=float(differences[column].mean()),
            loss_difference_error=float(differences[column].std(ddof=1) / math.sqrt(len(windows))),
            top_1_agreement=agreed[column] / num_tokens,
            divergence=divergence[column] / num_tokens,
            num_tokens=num_tokens,
            seconds=seconds[column],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="default: the installed model")
    parser.add_argument("--text", type=Path, default=TEXT, help="default: %(default)s")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--modes", nargs="+", default=[str(mode) for mode in MODES], metavar="MODE", help="default: %(default)s"
    )
    parser.add_argument("--json", type=Path, default=None, help="file to write the results to")
    options = parser.parse_args()
    checkpoint = open_checkpoint(find_model(options.model or str(installed_model())))
    backend = load_backend("auto", num_threads=options.threads)
    windows = read_windows(checkpoint, options.text, options.window)
    if len(windows) < 2:
        raise SystemExit(f"{options.text} has fewer than two windows of {options.window} tokens")
    print(f"{checkpoint.source.name}, {backend.describe()}, {len(windows)} windows of {options.window} tokens")
    modes = [mode for mode in MODES if mode == BASE or str(mode) in options.modes]
    if unknown := sorted({*options.modes} - {str(mode) for mode in modes}):
        raise SystemExit(f"there are no modes {unknown}; modes are {[str(mode) for mode in MODES]}")
    results = list(measure(checkpoint, backend, windows, modes))
    print("| mode | perplexity | over fp32 | loss - fp32's | same choice | divergence |\n|---|---|---|---|---|---|")
    for one in results:
        print(
            f"| {one.mode} | {one.perplexity:.3f} | {one.perplexity_over_fp32 - 1:+.2%} "
            f"| {one.loss_difference:+.4f} ± {one.loss_difference_error:.4f} "
            f"| {one.top_1_agreement:.2%} | {one.divergence:.5f} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
