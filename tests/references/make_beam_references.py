"""Writes the references for beam search: what `generate(num_beams=…)` of transformers returns in fp32.

    python tests/references/make_beam_references.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Needs what `make_references.py` needs. Two files come out: `beams/table.json`, a language model that is a table of
numbers and many searches over it, for the router's unit test; and, with `--gguf`, `beams/smollm2-135m-instruct.json`,
the default model's searches, for the end-to-end test.

Each search carries its *margin*: by how much the log-probability of a continuation would have to change for any of its
decisions to fall the other way. The script refuses prompts with a margin below `MIN_MARGIN`, so that the tests may
ask for equality without exception.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from make_references import HERE, MIN_MARGIN, load_default_model, tokenize
from prompts import BEAM_PROMPTS
from transformers.modeling_outputs import CausalLMOutput

FOLDER = HERE / "beams"
EARLY_STOPPINGS: tuple[bool | str, ...] = (False, True, "never")

NUM_BEAMS = 4
MAX_TOKENS = 48
LENGTH_PENALTIES = (0.5, 1.0, 2.0)

TABLE_SEED = 3
TABLE_POSITIONS = 9
TABLE_VOCAB_SIZE = 12
TABLE_BEAM_WIDTHS = (1, 2, 3, 5)
TABLE_EOS_TOKEN_IDS: tuple[tuple[int, ...], ...] = ((), (0,), (0, 1), (0, 1, 2))
TABLE_LENGTH_PENALTIES = (-0.5, 0.0, 0.5, 1.0, 2.0)
TABLE_MAX_TOKENS = (1, 2, 5, 9)


@dataclass(frozen=True)
class Settings:
    """One search's parameters, named as transformers names them."""

    num_beams: int
    max_new_tokens: int
    eos_token_id: tuple[int, ...]
    length_penalty: float
    early_stopping: bool | str


@dataclass
class Search:
    """What a search came to: its hypotheses, best first, how many steps it took, and its margin."""

    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    num_steps: int = 0
    margin: float = math.inf


class Margins:
    """Watches a search's decisions from inside and keeps the smallest margin.

    Scores of hypotheses are compared after division by length to the power of the penalty. Their gap is given in units
    of log-probability too: the change that both sums would need, in opposite directions, added up.
    """

    def __init__(self, model: transformers.PreTrainedModel, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._pool: list[tuple[float, float]] = []  # (score, divisor) of what has ended, best first
        self.smallest = math.inf
        self.num_steps = 0

    def __enter__(self) -> Margins:
        choose = self._model._get_top_k_continuations

        def watch(*, accumulated_log_probs: torch.Tensor, **others: Any) -> Any:
            self._observe(accumulated_log_probs[0])
            return choose(accumulated_log_probs=accumulated_log_probs, **others)

        self._model._get_top_k_continuations = watch
        return self

    def __exit__(self, *_: object) -> None:
        del self._model._get_top_k_continuations
        for better, worse in itertools.pairwise(self._pool):
            self._compare(better, worse)

    def _note(self, margin: float) -> None:
        self.smallest = min(self.smallest, margin)

    def _compare(self, a: tuple[float, float], b: tuple[float, float]) -> None:
        self._note(2 * abs(a[0] - b[0]) / (1 / a[1] + 1 / b[1]))

    def _observe(self, log_probs: torch.Tensor) -> None:
        settings, width = self._settings, self._settings.num_beams
        self.num_steps += 1
        is_last = self.num_steps == settings.max_new_tokens
        vocab_size = log_probs.shape[0] // width
        num_ranked = min(len(log_probs), (1 + max(1, len(settings.eos_token_id))) * width + 1)
        values, indices = log_probs.topk(num_ranked)
        ranked = values.double().tolist()
        is_eos = [int(index) % vocab_size in settings.eos_token_id for index in indices]
        running = [value for value, ends in zip(ranked, is_eos, strict=True) if not ends]
        divisor = self.num_steps**settings.length_penalty
        for rank, (value, ends) in enumerate(zip(ranked, is_eos, strict=True)):
            if ends or is_last:
                self._note(value - ranked[width] if rank < width else ranked[width - 1] - value)
                if rank < width:
                    self._pool.append((value / divisor, divisor))
        self._pool.sort(reverse=True)
        if len(self._pool) > width:
            self._compare(self._pool[width - 1], self._pool[width])
            del self._pool[width:]
        if is_last:
            return
        self._note(running[width - 1] - running[width])
        if len(self._pool) == width and settings.early_stopping is not True:
            ahead = settings.early_stopping == "never" and settings.length_penalty > 0
            best_divisor = (settings.max_new_tokens if ahead else self.num_steps) ** settings.length_penalty
            self._compare((running[0] / best_divisor, best_divisor), self._pool[-1])


def beam_search(model: transformers.PreTrainedModel, input_ids: torch.Tensor, **arguments: Any) -> Any:
    """For `custom_generate`: beam search even where there is one beam, for which `generate` would go greedily."""
    return model._beam_search(input_ids, **arguments)


def search(model: transformers.PreTrainedModel, prompt: Sequence[int], settings: Settings) -> Search:
    """transformers' beam search behind a prompt; all beams come back, without padding."""
    config = transformers.GenerationConfig(
        do_sample=False,
        num_beams=settings.num_beams,
        num_return_sequences=settings.num_beams,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=list(settings.eos_token_id) or None,
        pad_token_id=0,
        length_penalty=settings.length_penalty,
        early_stopping=settings.early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
        use_cache=False,
    )
    input_ids = torch.tensor([list(prompt)])
    with Margins(model, settings) as margins:
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            custom_generate=beam_search if settings.num_beams == 1 else None,
        )
    result = Search(num_steps=margins.num_steps, margin=margins.smallest)
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    for sequence, length, score in zip(output.sequences.tolist(), lengths, output.sequences_scores, strict=True):
        result.token_ids.append(sequence[len(prompt) : len(prompt) + length])
        result.scores.append(float(score))
        result.logprobs.append(float(score) * length**settings.length_penalty)
    return result


class TableModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A language model that knows the position and the last token: logits = table[position, token]."""

    config_class = transformers.PreTrainedConfig

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(transformers.PreTrainedConfig(vocab_size=table.shape[-1]))
        self.table = torch.nn.Parameter(table, requires_grad=False)  # (position, last token, next token)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        positions = torch.arange(input_ids.shape[1]) % len(self.table)
        return CausalLMOutput(logits=self.table[positions, input_ids])


class RememberingModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A model that computes each sequence's logits once.

    Which beams run does not depend on penalty or early_stopping, which only decide about what has ended. So the many
    searches behind one prompt ask for the same sequences, step by step, some for longer than others.
    """

    config_class = transformers.PreTrainedConfig

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__(transformers.PreTrainedConfig(vocab_size=model.config.vocab_size))
        self.model = model
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._rows: list[tuple[int, ...]] = []
        self._cache: Any = None

    def forget(self) -> None:
        self._logits.clear()
        self._rows.clear()
        self._cache = None

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        rows = [tuple(row) for row in input_ids.tolist()]
        if not all(row in self._logits for row in rows):
            if self._rows:
                parents = [self._rows.index(row[:-1]) for row in rows]
                self._cache.reorder_cache(torch.tensor(parents))
                input_ids = input_ids[:, -1:]
            output = self.model(input_ids, past_key_values=self._cache, use_cache=True)
            self._rows, self._cache = rows, output.past_key_values
            self._logits.update(zip(rows, output.logits[:, -1], strict=True))
        return CausalLMOutput(logits=torch.stack([self._logits[row] for row in rows])[:, None])


def table_settings(rng: random.Random) -> Iterator[Settings]:
    for width, eos, early_stopping, penalty in itertools.product(
        TABLE_BEAM_WIDTHS, TABLE_EOS_TOKEN_IDS, EARLY_STOPPINGS, TABLE_LENGTH_PENALTIES
    ):
        yield Settings(width, rng.choice(TABLE_MAX_TOKENS), eos, penalty, early_stopping)


def make_table() -> None:
    """A table of random log-probabilities in which ends are likely, and searches over it from random first tokens."""
    rng = random.Random(TABLE_SEED)
    generator = torch.Generator().manual_seed(TABLE_SEED)
    logits = torch.randn(TABLE_POSITIONS, TABLE_VOCAB_SIZE, TABLE_VOCAB_SIZE, generator=generator)
    logits[..., 0] += 0.5
    model = TableModel(logits).eval()
    searches = []
    for settings in table_settings(rng):
        first = rng.randrange(TABLE_VOCAB_SIZE)
        result = search(model, [first], settings)
        if result.margin < 1e-6:
            raise ValueError(f"{settings} behind token {first} has a tie: choose another seed")
        searches.append(
            {
                "beam_width": settings.num_beams,
                "max_tokens": settings.max_new_tokens,
                "eos_token_ids": settings.eos_token_id,
                "length_penalty": settings.length_penalty,
                "early_stopping": str(settings.early_stopping).lower(),
                "first_token_id": first,
                "num_steps": result.num_steps,
                "token_ids": result.token_ids,
                "scores": result.scores,
            }
        )
    write(FOLDER / "table.json", {"table": logits.log_softmax(-1).tolist()}, "searches", searches, depth=2)


def make_default_model(gguf: Path) -> None:
    """The default model's searches. Each hypothesis stands once a prompt; searches name them by their index."""
    whole_model, tokenizer = load_default_model(gguf)
    model = RememberingModel(whole_model).eval()
    eos = (tokenizer.eos_token_id,)
    entries = []
    for prompt in BEAM_PROMPTS:
        origin, ids = tokenize(tokenizer, prompt)
        model.forget()
        hypotheses: dict[tuple[int, ...], float] = {}
        searches = []
        for penalty, early_stopping in itertools.product(LENGTH_PENALTIES, EARLY_STOPPINGS):
            result = search(model, ids, Settings(NUM_BEAMS, MAX_TOKENS, eos, penalty, early_stopping))
            if result.margin <= MIN_MARGIN:
                raise ValueError(f"{prompt.name}: a near-tie, margin {result.margin}; choose another prompt")
            for token_ids, logprob in zip(result.token_ids, result.logprobs, strict=True):
                hypotheses.setdefault(tuple(token_ids), round(logprob, 5))
            indices = [list(hypotheses).index(tuple(token_ids)) for token_ids in result.token_ids]
            searches.append(
                {
                    "length_penalty": penalty,
                    "early_stopping": str(early_stopping).lower(),
                    "num_steps": result.num_steps,
                    "margin": round(result.margin, 6),
                    "hypotheses": indices,
                    "scores": [round(score, 7) for score in result.scores],
                }
            )
        listed = [{"token_ids": list(token_ids), "logprob": logprob} for token_ids, logprob in hypotheses.items()]
        entries.append(
            {"name": prompt.name, **origin, "prompt_token_ids": ids, "hypotheses": listed, "searches": searches}
        )
        lengths = sorted({entry["num_steps"] for entry in searches})
        print(f"  {prompt.name}: over after {lengths} tokens, {len(hypotheses)} hypotheses", flush=True)
    header = {"model": gguf.name, "beam_width": NUM_BEAMS, "max_tokens": MAX_TOKENS, "eos_token_ids": eos}
    write(FOLDER / "smollm2-135m-instruct.json", header, "references", entries, depth=4)


def lines_of(value: Any, depth: int) -> str:
    """JSON with line breaks down to a depth, lists of plain values left whole, so that a difference can be read."""
    is_nested = isinstance(value, dict) or (isinstance(value, list) and isinstance(value[0], dict | list))
    if depth == 0 or not is_nested:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {lines_of(v, depth - 1)}" for k, v in value.items()) + "\n}"
    return "[\n" + ",\n".join(lines_of(entry, depth - 1) for entry in value) + "\n]"


def write(path: Path, header: dict[str, Any], name: str, entries: list[dict[str, Any]], *, depth: int) -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32"}
    path.parent.mkdir(exist_ok=True)
    path.write_text(lines_of({**versions, **header, name: entries}, depth) + "\n", encoding="utf-8")
    print(f"{path.relative_to(HERE)}: {len(entries)} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="the default model's file; without it only the table is made")
    args = parser.parse_args()
    torch.set_num_threads(2)
    make_table()
    if args.gguf is not None:
        make_default_model(args.gguf.resolve())


if __name__ == "__main__":
    main()
