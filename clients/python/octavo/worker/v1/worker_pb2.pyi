from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Capability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPABILITY_UNSPECIFIED: _ClassVar[Capability]
    CAPABILITY_LOGIT_PROCESSORS: _ClassVar[Capability]
    CAPABILITY_GRAMMARS: _ClassVar[Capability]
    CAPABILITY_PROMPT_LOGPROBS: _ClassVar[Capability]
    CAPABILITY_BEAMS: _ClassVar[Capability]
    CAPABILITY_ADAPTERS: _ClassVar[Capability]
    CAPABILITY_SWAP: _ClassVar[Capability]

class SequenceErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_ERROR_CODE_UNSPECIFIED: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_INVALID: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_NUMERIC: _ClassVar[SequenceErrorCode]
    SEQUENCE_ERROR_CODE_GRAMMAR: _ClassVar[SequenceErrorCode]
CAPABILITY_UNSPECIFIED: Capability
CAPABILITY_LOGIT_PROCESSORS: Capability
CAPABILITY_GRAMMARS: Capability
CAPABILITY_PROMPT_LOGPROBS: Capability
CAPABILITY_BEAMS: Capability
CAPABILITY_ADAPTERS: Capability
CAPABILITY_SWAP: Capability
SEQUENCE_ERROR_CODE_UNSPECIFIED: SequenceErrorCode
SEQUENCE_ERROR_CODE_INVALID: SequenceErrorCode
SEQUENCE_ERROR_CODE_NUMERIC: SequenceErrorCode
SEQUENCE_ERROR_CODE_GRAMMAR: SequenceErrorCode

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "worker_name", "incarnation", "last_epoch", "model", "kv_memory", "max_plans_in_flight", "max_batched_token_count", "lease_ms", "capabilities", "prefill_tokens_per_s", "swap_bytes_per_s", "backend", "version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_MEMORY_FIELD_NUMBER: _ClassVar[int]
    MAX_PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_name: str
    incarnation: int
    last_epoch: int
    model: ModelInfo
    kv_memory: KvMemoryInfo
    max_plans_in_flight: int
    max_batched_token_count: int
    lease_ms: int
    capabilities: _containers.RepeatedScalarFieldContainer[Capability]
    prefill_tokens_per_s: float
    swap_bytes_per_s: float
    backend: str
    version: str
    def __init__(self, protocol_version: _Optional[int] = ..., worker_name: _Optional[str] = ..., incarnation: _Optional[int] = ..., last_epoch: _Optional[int] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., kv_memory: _Optional[_Union[KvMemoryInfo, _Mapping]] = ..., max_plans_in_flight: _Optional[int] = ..., max_batched_token_count: _Optional[int] = ..., lease_ms: _Optional[int] = ..., capabilities: _Optional[_Iterable[_Union[Capability, str]]] = ..., prefill_tokens_per_s: _Optional[float] = ..., swap_bytes_per_s: _Optional[float] = ..., backend: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "digest", "tokenizer_digest", "architecture", "vocab_size", "max_model_len", "dtype", "quantization", "parameter_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    tokenizer_digest: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    quantization: str
    parameter_count: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., parameter_count: _Optional[int] = ...) -> None: ...

class KvMemoryInfo(_message.Message):
    __slots__ = ("block_size", "device_block_count", "host_block_count", "bytes_per_block", "dtype", "layout")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    device_block_count: int
    host_block_count: int
    bytes_per_block: int
    dtype: str
    layout: str
    def __init__(self, block_size: _Optional[int] = ..., device_block_count: _Optional[int] = ..., host_block_count: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("defaults", "tokenizer_json")
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    defaults: TokenizerDefaults
    tokenizer_json: bytes
    def __init__(self, defaults: _Optional[_Union[TokenizerDefaults, _Mapping]] = ..., tokenizer_json: _Optional[bytes] = ...) -> None: ...

class TokenizerDefaults(_message.Message):
    __slots__ = ("chat_template", "eos_token_ids", "bos_token", "eos_token", "temperature", "top_p", "top_k", "special_tokens")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    chat_template: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token: str
    eos_token: str
    temperature: float
    top_p: float
    top_k: int
    special_tokens: _containers.ScalarMap[str, str]
    def __init__(self, chat_template: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token: _Optional[str] = ..., eos_token: _Optional[str] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., special_tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("epoch", "incarnation", "step_seq", "open", "sequence_tokens", "plan", "renew")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: int
    step_seq: int
    open: OpenSession
    sequence_tokens: SequenceTokens
    plan: StepPlan
    renew: Renew
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., step_seq: _Optional[int] = ..., open: _Optional[_Union[OpenSession, _Mapping]] = ..., sequence_tokens: _Optional[_Union[SequenceTokens, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("protocol_version", "router_name")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_NAME_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    router_name: str
    def __init__(self, protocol_version: _Optional[int] = ..., router_name: _Optional[str] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SequenceTokens(_message.Message):
    __slots__ = ("sequence_id", "token_ids")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("new_sequences", "release_sequence_ids", "swap_out", "swap_in", "copies", "forks", "scheduled")
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    RELEASE_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    new_sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    release_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    swap_out: BlockMoves
    swap_in: BlockMoves
    copies: BlockMoves
    forks: Forks
    scheduled: ScheduledSequences
    def __init__(self, new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., release_sequence_ids: _Optional[_Iterable[int]] = ..., swap_out: _Optional[_Union[BlockMoves, _Mapping]] = ..., swap_in: _Optional[_Union[BlockMoves, _Mapping]] = ..., copies: _Optional[_Union[BlockMoves, _Mapping]] = ..., forks: _Optional[_Union[Forks, _Mapping]] = ..., scheduled: _Optional[_Union[ScheduledSequences, _Mapping]] = ...) -> None: ...

class BlockMoves(_message.Message):
    __slots__ = ("source_block_ids", "target_block_ids")
    SOURCE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    source_block_ids: _containers.RepeatedScalarFieldContainer[int]
    target_block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source_block_ids: _Optional[_Iterable[int]] = ..., target_block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("sequence_id", "prompt_token_count", "token_ids", "block_ids", "params")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    prompt_token_count: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    params: SequenceParams
    def __init__(self, sequence_id: _Optional[int] = ..., prompt_token_count: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[SequenceParams, _Mapping]] = ...) -> None: ...

class SequenceParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "return_logprobs", "top_logprob_count", "return_prompt_logprobs", "top_prompt_logprob_count", "suppressed_token_ids", "min_token_count", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias_token_ids", "logit_biases", "allowed_token_ids", "bad_word_token_ids", "bad_word_lengths", "grammar", "adapter", "candidate_count")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RETURN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROB_COUNT_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_PROMPT_LOGPROB_COUNT_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIASES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    return_logprobs: bool
    top_logprob_count: int
    return_prompt_logprobs: bool
    top_prompt_logprob_count: int
    suppressed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_token_count: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_biases: _containers.RepeatedScalarFieldContainer[float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_word_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_word_lengths: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    adapter: str
    candidate_count: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., return_logprobs: bool = ..., top_logprob_count: _Optional[int] = ..., return_prompt_logprobs: bool = ..., top_prompt_logprob_count: _Optional[int] = ..., suppressed_token_ids: _Optional[_Iterable[int]] = ..., min_token_count: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias_token_ids: _Optional[_Iterable[int]] = ..., logit_biases: _Optional[_Iterable[float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_word_token_ids: _Optional[_Iterable[int]] = ..., bad_word_lengths: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ..., adapter: _Optional[str] = ..., candidate_count: _Optional[int] = ...) -> None: ...

class Forks(_message.Message):
    __slots__ = ("parent_sequence_ids", "child_sequence_ids", "token_ids", "block_counts", "block_ids", "token_counts")
    PARENT_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    CHILD_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    parent_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    child_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_counts: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, parent_sequence_ids: _Optional[_Iterable[int]] = ..., child_sequence_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_counts: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class ScheduledSequences(_message.Message):
    __slots__ = ("sequence_ids", "start_positions", "token_counts", "samples", "new_block_counts", "new_block_ids")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    START_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    start_positions: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedScalarFieldContainer[bool]
    new_block_counts: _containers.RepeatedScalarFieldContainer[int]
    new_block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., start_positions: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[bool]] = ..., new_block_counts: _Optional[_Iterable[int]] = ..., new_block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("epoch", "incarnation", "step_seq", "opened", "result", "progress")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: int
    step_seq: int
    opened: SessionOpened
    result: StepResult
    progress: Progress
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., step_seq: _Optional[int] = ..., opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Progress(_message.Message):
    __slots__ = ("executor_tick", "busy")
    EXECUTOR_TICK_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    executor_tick: int
    busy: bool
    def __init__(self, executor_tick: _Optional[int] = ..., busy: bool = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("sequence_ids", "token_ids", "logprobs", "prompt_logprobs", "candidates", "errors", "duration_us", "idle_us", "moved_byte_count")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: LogprobColumns
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidates]
    errors: _containers.RepeatedCompositeFieldContainer[SequenceError]
    duration_us: int
    idle_us: int
    moved_byte_count: int
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[Candidates, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[SequenceError, _Mapping]]] = ..., duration_us: _Optional[int] = ..., idle_us: _Optional[int] = ..., moved_byte_count: _Optional[int] = ...) -> None: ...

class LogprobColumns(_message.Message):
    __slots__ = ("logprobs", "top_counts", "top_token_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("sequence_id", "start_position", "columns")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    start_position: int
    columns: LogprobColumns
    def __init__(self, sequence_id: _Optional[int] = ..., start_position: _Optional[int] = ..., columns: _Optional[_Union[LogprobColumns, _Mapping]] = ...) -> None: ...

class Candidates(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "logprobs")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("sequence_id", "code", "message")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    code: SequenceErrorCode
    message: str
    def __init__(self, sequence_id: _Optional[int] = ..., code: _Optional[_Union[SequenceErrorCode, str]] = ..., message: _Optional[str] = ...) -> None: ...
