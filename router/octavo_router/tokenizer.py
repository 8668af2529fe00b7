"""The model's tokenizer, built from the bytes that a worker sends: text to token ids and back, and what one token is.

Immutable once built, so that many threads may use one; other Python threads run while it encodes. Text that arrives
token by token is `text_stream`'s, chat templates are `chat_template`'s, limits on token counts are the callers'.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from octavo.errors import InvalidRequestError, ModelLoadError
from octavo.worker.v1 import worker_pb2
from octavo_router.token_decoder import BYTE_ALPHABET, DecoderPlan, Piece, TokenDecoder

_MAX_TOKEN_ID = 2**32 - 1

# Normalizers and the factor by which they shorten a text at most, in characters and in UTF-8 bytes. NFC makes one
# character of up to four (U+1F82) and two bytes of up to seven (U+0390); NFD one byte of up to three (U+212A). What is
# not named here may drop any amount of text.
_NORMALIZER_SHRINKAGE = {"NFC": 4, "NFD": 3, "Prepend": 1, "ByteLevel": 1}
_LOSSLESS_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "Split"}


class Tokenizer:
    """A tokenizer.json with the special tokens and end-of-sequence ids that the model names beside it."""

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """special_tokens: name, such as "bos_token", to text. Those that the vocabulary has count as special tokens.

        Raises ModelLoadError for bytes that are no tokenizer.json, or one that decodes in a way that is not known.
        """
        try:
            self._backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
            description: dict[str, Any] = json.loads(tokenizer_json)
        except ValueError as error:
            raise ModelLoadError(f"tokenizer.json ({len(tokenizer_json)} bytes) cannot be read: {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens: dict[str, str] = {name: text for name, text in (special_tokens or {}).items() if text}
        """Name to text, as chat templates take them."""
        known = [text for text in self.special_tokens.values() if self._backend.token_to_id(text) is not None]
        self._backend.add_special_tokens(list(dict.fromkeys(known)))
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        """Ids that `skip_special_tokens` leaves out."""
        self._special_ids_by_text = {added[token_id].content: token_id for token_id in self.special_token_ids}
        spellings = sorted(self._special_ids_by_text, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self.eos_token_ids: frozenset[int] = frozenset(eos_token_ids)
        """Ids that end a sequence."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        """The largest id plus 1. A model may have more rows than that; their ids decode to nothing."""
        self._plan = DecoderPlan(description.get("decoder"))
        self._pieces: dict[int, Piece | None] = {}
        self._bound = _LengthBound(description, vocabulary, added.values())

    @classmethod
    def from_defaults(cls, tokenizer_json: bytes, defaults: worker_pb2.TokenizerDefaults) -> Tokenizer:
        """The tokenizer that a worker's GetTokenizer describes. Raises as the constructor."""
        special = {"bos_token": defaults.bos_token, "eos_token": defaults.eos_token, **defaults.special_tokens}
        return cls(tokenizer_json, special_tokens=special, eos_token_ids=defaults.eos_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the special tokens, by id."""
        return sorted(self._special_ids_by_text, key=self._special_ids_by_text.__getitem__)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in it become their ids.

        add_special_tokens: what the tokenizer puts around a text of its own, such as a beginning-of-sequence token.
        A rendered chat takes False: its template has put them. Raises InvalidRequestError for a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}; "
                "send whole characters",
                field="text",
            ) from None
        # A batch of one: encode_batch lets other Python threads run, encode does not.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = False
    ) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD; ids without a token become nothing.

        spaces_between_special_tokens: puts a space between each two special tokens that follow one another, where they
        are kept. Raises InvalidRequestError for an id that no vocabulary can have.
        """
        for token_id in ids:
            if not 0 <= token_id <= _MAX_TOKEN_ID:
                raise InvalidRequestError(f"token id {token_id} is out of range; ids are 0 or more", field="token_ids")
        if skip_special_tokens or not spaces_between_special_tokens:
            # A batch of one, as in `encode`.
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        decoder = self.start_decoder()
        parts: list[str] = []
        follows_special = False
        for token_id in ids:
            piece = self.piece(token_id)
            if piece is None:
                continue
            is_special = token_id in self.special_token_ids
            if is_special and follows_special:
                parts.append(decoder.push(" "))
            parts.append(decoder.push(piece))
            follows_special = is_special
        return "".join(parts) + decoder.finish()

    def token_id(self, token: str) -> int | None:
        """Id of a token, as the vocabulary spells it. None: there is no such token."""
        return self._backend.token_to_id(token)

    def token_spelling(self, token_id: int) -> str:
        """A token as the vocabulary spells it, such as "\u0120Paris". Empty for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """What a token adds in the middle of a text, with U+FFFD for bytes that are no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 that a token adds in the middle of a text. Empty for an id without a token."""
        piece = self.piece(token_id)
        if piece is None:
            return b""
        if isinstance(piece, bytes):
            return piece
        if (byte := self._plan.fallback_byte(piece)) is not None:
            return bytes([byte])
        decoder = self.start_decoder()
        before = decoder.push("x")
        text = before + decoder.push(piece) + decoder.finish()
        return text[1:].encode()

    def split_special_tokens(self, text: str) -> list[str | int]:
        """A text cut into the special tokens that it spells, as ids, and what stands between.

        Of special tokens that begin together the longest counts.
        """
        parts: list[str | int] = []
        end = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > end:
                parts.append(text[end : match.start()])
            parts.append(self._special_ids_by_text[match.group()])
            end = match.end()
        return [*parts, text[end:]] if end < len(text) else parts

    def piece(self, token_id: int) -> Piece | None:
        """What a token hands to a decoder. None for an id without a token."""
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self._backend.id_to_token(token_id)
            piece = None if token is None else self._plan.piece(token)
            self._pieces[token_id] = piece  # two threads may both do this, with the same outcome
            return piece

    def start_decoder(self) -> TokenDecoder:
        """An incremental decoder at the beginning of a text; it takes the tokens' pieces."""
        return self._plan.start()

    def min_token_count(self, text: str) -> int:
        """A lower bound on len(encode(text)), found without tokenizing: the text's length over the longest token's.

        0 where the tokenizer may drop text, so that nothing can be said.
        """
        return self._bound.min_token_count(text)


class _LengthBound:
    """How much of a text one token can stand for at most."""

    def __init__(
        self, description: Mapping[str, Any], vocabulary: Mapping[str, int], added: Iterable[tokenizers.AddedToken]
    ) -> None:
        added = list(added)
        self._counts_bytes = _is_byte_level(description)
        self._swallows_space = any(token.lstrip or token.rstrip for token in added)
        # Bytes that a byte-level vocabulary lacks are dropped, or become an unknown token that may stand for many.
        self._dropped = bytes(byte for char, byte in BYTE_ALPHABET.items() if char not in vocabulary)
        self._longest = 0
        shrinkage = _shrinkage(description.get("normalizer"))
        if shrinkage is not None and _is_lossless(description, vocabulary):
            # A character of a byte-level token is one byte.
            longest = max((len(token) for token in vocabulary), default=0)
            longest_added = max((len(token.content.encode()) for token in added), default=0)
            self._longest = shrinkage * max(longest, longest_added)

    def min_token_count(self, text: str) -> int:
        if not self._longest:
            return 0
        if self._swallows_space:
            text = "".join(text.split())
        length = len(text)
        if self._counts_bytes:
            # A lone surrogate, which encode refuses, is three bytes like its neighbours.
            length = len(text.encode(errors="surrogatepass").translate(None, self._dropped))
        return -(-length // self._longest)


def _parts(spec: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """A normalizer's or pre-tokenizer's parts, sequences opened."""
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [part for inner in spec[key] for part in _parts(inner, key)]
    return [spec]


def _is_byte_level(description: Mapping[str, Any]) -> bool:
    parts = _parts(description.get("pre_tokenizer"), "pretokenizers") + _parts(
        description.get("normalizer"), "normalizers"
    )
    return any(part["type"] == "ByteLevel" for part in parts)


def _shrinkage(normalizer: Mapping[str, Any] | None) -> int | None:
    """The factor by which normalizing may shorten a text at most. None: any."""
    factor = 1
    for part in _parts(normalizer, "normalizers"):
        if part["type"] == "Replace":
            old = part["pattern"].get("String")
            if not old or len(part["content"]) < len(old) or len(part["content"].encode()) < len(old.encode()):
                return None
        elif part["type"] in _NORMALIZER_SHRINKAGE:
            factor *= _NORMALIZER_SHRINKAGE[part["type"]]
        else:
            return None
    return factor


def _is_lossless(description: Mapping[str, Any], vocabulary: Mapping[str, int]) -> bool:
    """Whether each character of a normalized text ends in a token, but for bytes that the vocabulary lacks."""
    for part in _parts(description.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] not in _LOSSLESS_PRE_TOKENIZERS or part.get("behavior") == "Removed":
            return False
    model = description["model"]
    if _is_byte_level(description):
        return model.get("type") == "BPE" or "merges" in model  # old files leave the type out
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
