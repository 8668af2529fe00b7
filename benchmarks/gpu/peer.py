"""transformers on the same device, with random weights of the same shape: `generate` on a static batch, and its
continuous batching."""

from __future__ import annotations

import gc
import inspect
import logging
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from gpu.bench import Bench
from gpu.load import prompts


class Peer:
    """The model in transformers. version: of the library; attention: the kind that the last run used."""

    def __init__(self, bench: Bench) -> None:
        import transformers  # is not among the product's packages

        transformers.logging.set_verbosity_error()
        shape = bench.sizes.model
        config = transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=shape.max_model_len,
            rms_norm_eps=shape.rms_norm_eps,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        with bench.device.torch_device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=bench.sizes.dtype)
        self.version: str = transformers.__version__
        self._model = model.eval()
        self._bench = bench
        self._options: dict[str, Any] = {}

    @property
    def attention(self) -> str:
        return str(self._model.config._attn_implementation)

    def generate(self) -> Iterator[float]:
        """Output tokens a second of one static batch: of two runs behind a short one."""
        inputs = torch.tensor(prompts(self._bench, 1), device=self._bench.device.torch_device)
        self._static(inputs, 4)
        for _ in range(2):
            yield self._static(inputs, self._bench.sizes.output)

    def _static(self, inputs: torch.Tensor, count: int) -> float:
        self._bench.device.synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        self._bench.device.synchronize()
        return float((output.shape[1] - inputs.shape[1]) * len(output) / (time.perf_counter() - started))

    def continuous(self) -> Iterator[float]:
        """Output tokens a second of continuous batching, from its first request's start to its last token: its own
        setting up is left out. Of three runs, the first of which may be slower."""
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
        for number in range(3):
            inputs, rate = prompts(self._bench, 2 + number), 0.0
            try:
                rate = self._continuous(inputs, self._bench.sizes.output)
            except Exception:
                self._options = {} if number else _own_attention()
                if not self._options:
                    raise
                traceback.print_exc()
            if not rate:  # it chose attention from a package that does not run here, or that only a network would bring
                print("once more, with the attention that the model was loaded with", flush=True)
                self._forget_manager()
                rate = self._continuous(inputs, self._bench.sizes.output)
            yield rate

    def _forget_manager(self) -> None:
        """Has the next run make a new one; the present one may hold most of the device's memory."""
        if hasattr(self._model, "destroy_cached_continuous_batching_manager"):
            self._model.destroy_cached_continuous_batching_manager()
        gc.collect()
        self._bench.device.free_memory()

    def _continuous(self, inputs: list[list[int]], count: int) -> float:
        import transformers

        config = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        # One manager for all runs, whose graphs are recorded once; on a CPU there are none.
        wished = {"persistent_manager": True, "warmup": self._bench.device.is_asynchronous}
        known = inspect.signature(self._model.generate_batch).parameters
        options = {name: value for name, value in wished.items() if name in known} | self._options
        started = time.perf_counter()
        answers = self._model.generate_batch(inputs=inputs, generation_config=config, progress_bar=False, **options)
        ended = time.perf_counter()
        outputs = list(answers.values())
        num_tokens = sum(len(output.generated_tokens) for output in outputs)
        if num_tokens != len(inputs) * count:
            why = next((output.error for output in outputs if output.error), "it does not say why")
            raise RuntimeError(f"{num_tokens} tokens came of {len(inputs) * count}: {why}")
        if all(output.lifespan[0] > 0 and output.lifespan[1] > 0 for output in outputs):
            started = min(output.lifespan[0] for output in outputs)
            ended = max(output.lifespan[1] for output in outputs)
        return float(num_tokens / (ended - started))

    def close(self) -> None:
        """Gives the memory back."""
        del self._model
        gc.collect()
        self._bench.device.free_memory()


def _own_attention() -> dict[str, Any]:
    """What has continuous batching keep a model's attention; nothing where it cannot be told."""
    import transformers

    kind = getattr(transformers, "ContinuousBatchingConfig", None)
    if kind is None or "auto_switch_to_flash" not in inspect.signature(kind).parameters:
        return {}
    return {"continuous_batching_config": kind(auto_switch_to_flash=False)}
