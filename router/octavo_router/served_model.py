"""The model as the front ends see it: what a worker's description and the router's settings make of each other."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import RouterConfig
from octavo.worker.v1 import worker_pb2 as pb
from octavo_router.limits import Limits
from octavo_router.request import Sampling

# Most tokens of a step where neither the settings nor the worker say.
_BATCHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served. names: what requests may call it, the first is reported; max_model_len: most tokens of a
    request, prompt and output, that the model, the settings and the KV pool admit; created_unix_s: when the router
    began to serve it; capabilities: what its worker can do beyond the base contract, as octavo.worker.v1.Capability.
    """

    names: tuple[str, ...]
    digest: str
    tokenizer_digest: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_device_blocks: int
    default_sampling: Sampling
    created_unix_s: float
    capabilities: frozenset[int]

    @classmethod
    def from_description(
        cls,
        description: pb.DescribeResponse,
        config: RouterConfig,
        *,
        default_sampling: Sampling,
        created_unix_s: float,
    ) -> ServedModel:
        """The model that a worker describes, under the router's settings."""
        model, memory = description.model, description.kv_memory
        limits = limits_of(description, config)
        return cls(
            names=config.served_model_name or (model.name,),
            digest=model.digest,
            tokenizer_digest=model.tokenizer_digest,
            vocab_size=model.vocab_size,
            max_model_len=min(limits.max_model_len, limits.pool_tokens),
            block_size=memory.block_size,
            num_device_blocks=memory.device_block_count,
            default_sampling=default_sampling,
            created_unix_s=created_unix_s,
            capabilities=frozenset(description.capabilities),
        )


def limits_of(description: pb.DescribeResponse, config: RouterConfig) -> Limits:
    """What steps and requests must keep to: of each setting and what the worker can, the smaller."""
    memory = description.kv_memory
    offered_tokens = description.max_batched_token_count  # 0 where the worker sets no limit
    wanted_tokens = config.max_num_batched_tokens or offered_tokens or _BATCHED_TOKENS
    return Limits(
        block_size=memory.block_size,
        num_device_blocks=memory.device_block_count,
        max_model_len=min(
            config.max_model_len or description.model.max_model_len,
            description.model.max_model_len,
        ),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=min(wanted_tokens, offered_tokens or wanted_tokens),
        max_plans_in_flight=max(1, min(config.max_plans_in_flight, description.max_plans_in_flight)),
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=memory.host_block_count if pb.CAPABILITY_SWAP in description.capabilities else 0,
        bytes_per_block=memory.bytes_per_block,
        prefill_tokens_per_s=description.prefill_tokens_per_s,
        swap_bytes_per_s=description.swap_bytes_per_s,
        model_digest=description.model.digest,
        vocab_size=description.model.vocab_size,
    )
