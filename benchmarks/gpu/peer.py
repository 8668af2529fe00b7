"""transformers on the same device, with random weights of the same shape: `generate` on a static batch, and its
continuous batching."""

from __future__ import annotations

import gc
import inspect
import logging
import time

import torch

from gpu.bench import Bench
from gpu.load import prompts


class Peer:
    """The model in transformers. version: of the library."""

    def __init__(self, bench: Bench) -> None:
        import transformers

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

    def generate(self) -> float:
        """Output tokens a second of one static batch: the better of two runs behind a short one."""
        inputs = torch.tensor(prompts(self._bench, 1), device=self._bench.device.torch_device)
        self._static(inputs, 4)
        return max(self._static(inputs, self._bench.sizes.output) for _ in range(2))

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
        return (output.shape[1] - inputs.shape[1]) * len(output) / (time.perf_counter() - started)

    def continuous(self) -> float:
        """Output tokens a second of continuous batching, from its first request's start to its last token: its own
        setting up is left out. The better of two runs behind one."""
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
        return max(self._continuous(prompts(self._bench, seed), self._bench.sizes.output) for seed in (2, 3, 4))

    def _continuous(self, inputs: list[list[int]], count: int) -> float:
        import transformers

        config = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        # One manager for all runs, whose graphs are recorded once; on a CPU there are none.
        wished = {"persistent_manager": True, "warmup": self._bench.device.is_asynchronous}
        known = inspect.signature(self._model.generate_batch).parameters
        options = {name: value for name, value in wished.items() if name in known}
        started = time.perf_counter()
        answers = self._model.generate_batch(inputs=inputs, generation_config=config, progress_bar=False, **options)
        ended = time.perf_counter()
        outputs = list(answers.values())
        num_tokens = sum(len(output.generated_tokens) for output in outputs)
        if num_tokens != len(inputs) * count:
            raise RuntimeError(f"{num_tokens} tokens came of {len(inputs) * count}: {outputs[0].error}")
        if all(output.lifespan[0] > 0 and output.lifespan[1] > 0 for output in outputs):
            started = min(output.lifespan[0] for output in outputs)
            ended = max(output.lifespan[1] for output in outputs)
        return num_tokens / (ended - started)

    def close(self) -> None:
        """Gives the memory back."""
        del self._model
        gc.collect()
        self._bench.device.free_memory()
