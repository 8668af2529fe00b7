"""Checks what a caller holds of a generation that was cut off against the request, the prompt and the served model.

What does not match is refused, since going on from it would give a text that nobody asked for. How the held text is
told from what is still to come is `sample.py`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from octavo.errors import ResumeMismatchError
from octavo.v1 import inference_pb2 as pb
from octavo_router.request import FinishReason, ResumedSample, Sampling

_FINISH_REASONS = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    # What a sample called is said of its text; the engine knows that it stopped.
    pb.FINISH_REASON_TOOL_CALLS: FinishReason.STOP,
}


def check_model(resume: pb.Resume, model_digest: str) -> None:
    """Raises ResumeMismatchError where another model began the generation than is served."""
    if resume.model_digest != model_digest:
        raise ResumeMismatchError(
            f"the generation was begun by model {resume.model_digest or '(none named)'}, and {model_digest} is served "
            "here; send the request without resume"
        )


def resumed_sampling(resume: pb.Resume, sampling: Sampling, *, is_seed_given: bool) -> Sampling:
    """The request's sampling with the seed that the generation was begun with.

    Raises ResumeMismatchError where the request gives another one.
    """
    if is_seed_given and sampling.seed != resume.seed:
        raise ResumeMismatchError(
            f"the generation was begun with seed {resume.seed} and the request's is {sampling.seed}; send the one that "
            "the first response carried"
        )
    return dataclasses.replace(sampling, seed=resume.seed)


def check_prompt(resume: pb.Resume, prompt_token_ids: Sequence[int]) -> None:
    """Raises ResumeMismatchError where the request's prompt has other tokens than the generation was begun with."""
    if list(resume.prompt_token_ids) == list(prompt_token_ids):
        return
    if not resume.prompt_token_ids:
        raise ResumeMismatchError(
            "the resume has no prompt_token_ids; ask for them with output.return_prompt_token_ids and send them"
        )
    differs = _first_difference(resume.prompt_token_ids, prompt_token_ids)
    raise ResumeMismatchError(
        f"the generation was begun behind a prompt of {len(resume.prompt_token_ids)} tokens and the request's has "
        f"{len(prompt_token_ids)}; they differ from token {differs}, counted from 0. Send the same prompt, for example "
        "its token ids"
    )


def resumed_samples(
    resume: pb.Resume, sampling: Sampling, *, num_echo_bytes: int, max_tokens: int, vocab_size: int
) -> tuple[ResumedSample, ...]:
    """What the caller holds of the generation, by sample; samples of which it holds nothing are left out.

    Empty for beam searches and best_of above n, which start over, and where no token is generated. num_echo_bytes:
    length of the echoed prompt, with which each sample's text began. Raises ResumeMismatchError for a sample that the
    request cannot have.
    """
    if starts_over(sampling) or not max_tokens:
        return ()
    held: dict[int, ResumedSample] = {}
    for sample in resume.samples:
        index = sample.sample_index
        if index >= sampling.n:
            raise ResumeMismatchError(f"the resume names sample {index} and n is {sampling.n}; they count from 0")
        if index in held:
            raise ResumeMismatchError(f"the resume names sample {index} twice; name each once")
        num_bytes = max(sample.text_byte_count - num_echo_bytes, 0)
        held[index] = _resumed_sample(sample, num_bytes, max_tokens=max_tokens, vocab_size=vocab_size)
    return tuple(sample for _, sample in sorted(held.items()) if sample.token_ids or sample.finish_reason is not None)


def starts_over(sampling: Sampling) -> bool:
    """Whether a resume begins anew whatever is held, since all the output comes in one response at the end."""
    return sampling.beams is not None or sampling.best_of > sampling.n


def unsent_echo(resume: pb.Resume, sampling: Sampling, echo: str) -> list[str]:
    """What each sample's caller has not got of the echoed prompt. Raises ResumeMismatchError for half a character."""
    echoes = [echo] * sampling.n
    if starts_over(sampling):
        return echoes
    data = echo.encode()
    for sample in resume.samples:
        try:
            echoes[sample.sample_index] = data[sample.text_byte_count :].decode()
        except UnicodeDecodeError:
            raise ResumeMismatchError(
                f"the resume holds {sample.text_byte_count} bytes of text of sample {sample.sample_index}, which end "
                "within a character of the prompt; send the length of the text that was received"
            ) from None
    return echoes


def _resumed_sample(sample: pb.ResumedSample, num_bytes: int, *, max_tokens: int, vocab_size: int) -> ResumedSample:
    index, token_ids = sample.sample_index, tuple(sample.token_ids)
    if len(token_ids) > max_tokens:
        raise ResumeMismatchError(
            f"the resume holds {len(token_ids)} tokens of sample {index} and max_tokens is {max_tokens}; send the "
            "request as it was"
        )
    if max(token_ids, default=0) >= vocab_size:
        raise ResumeMismatchError(
            f"the resume holds token {max(token_ids)} of sample {index}; token ids of this model are from 0 to "
            f"{vocab_size - 1}"
        )
    if sample.finish_reason not in _FINISH_REASONS:
        raise ResumeMismatchError(
            f"the resume has finish_reason {sample.finish_reason} of sample {index}; "
            "samples end with FINISH_REASON_STOP, FINISH_REASON_LENGTH or FINISH_REASON_TOOL_CALLS"
        )
    if num_bytes and not token_ids:
        raise ResumeMismatchError(
            f"the resume holds {num_bytes} bytes of text and no tokens of sample {index}; send the tokens"
        )
    return ResumedSample(
        sample_index=index,
        token_ids=token_ids,
        text_byte_count=num_bytes,
        finish_reason=_FINISH_REASONS[sample.finish_reason],
        cumulative_logprob=sample.cumulative_logprob,
    )


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))
