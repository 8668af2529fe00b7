"""Finding, reading and checking models: folders with safetensors, and GGUF files.

Nothing here computes with a model; `octavo_worker.models` does. Only `gguf_quants`, `safetensors` and `checkpoint`
use torch.
"""
