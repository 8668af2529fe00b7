"""transformers' `generate`, as a peer: one static batch of prompts of one length, in the data type asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol import Peer, Prompts, serve


def read_model(path: Path, dtype: str) -> Any:
    """The model, from a GGUF file or a folder, computing in `dtype`; raises ValueError if any weight is in another."""
    import torch
    import transformers

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":
        source = {
            "pretrained_model_name_or_path": str(path.parent),
            "gguf_file": path.name,
            "quantization_config": transformers.GgufConfig(dequantize=True),
        }
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype)).eval()
    others = {str(weight.dtype) for weight in model.parameters() if weight.dtype != getattr(torch, dtype)}
    if others:
        raise ValueError(f"weights are in {', '.join(sorted(others))}, not {dtype}")
    return model


def load(path: Path, dtype: str, threads: int) -> Peer:
    """transformers with the model loaded."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = read_model(path, dtype)

    def generate(prompts: Prompts, num_tokens: int) -> int:
        input_ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
        return int((output.shape[1] - input_ids.shape[1]) * output.shape[0])

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return Peer("transformers", versions, f"{dtype}, static batches", generate)


if __name__ == "__main__":
    serve(__doc__, load)
