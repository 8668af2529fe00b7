"""OpenVINO GenAI's ContinuousBatchingPipeline, as a peer. It reads the GGUF file itself and chooses what it computes
in, so `--dtype` is not asked.
"""

from __future__ import annotations

from pathlib import Path

from protocol import Peer, Prompts, serve

MAX_NUM_SEQS = 64
# Octavo's default; OpenVINO's own, 256, makes two chunks of each of them.
MAX_NUM_BATCHED_TOKENS = 512
CACHE_GIB = 1


def load(path: Path, dtype: str, threads: int) -> Peer:
    """The pipeline with the model loaded; prefixes are not cached."""
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = MAX_NUM_SEQS
    scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
    scheduler.cache_size = CACHE_GIB
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(path), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )

    def generate(prompts: Prompts, num_tokens: int) -> int:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(numpy.array([prompt], numpy.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(prompts))
        return sum(len(result.m_generation_ids[0]) for result in results)

    versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
    return Peer("openvino", versions, "the GGUF file, its own choice of precision", generate)


if __name__ == "__main__":
    serve(__doc__, load)
