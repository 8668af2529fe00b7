"""Encoding, decoding, single tokens and the lower bound on token counts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError, ModelLoadError
from octavo.worker.v1 import worker_pb2
from octavo_router.tokenizer import Tokenizer
from tests.router import text_samples
from tests.router.text_samples import HARD_TEXTS, byte_level, sentencepiece


def edited(tokenizer: Tokenizer, **parts: object) -> Tokenizer:
    """The tokenizer with parts of its tokenizer.json replaced."""
    description = json.loads(tokenizer._backend.to_str())
    return Tokenizer(json.dumps({**description, **parts}).encode())


class TestLoading:
    @pytest.mark.parametrize("data", [b"", b"{}", b"not json", b"\xff\xfe", b"[]", b'{"model": null}'])
    def test_what_is_no_tokenizer_json_is_refused(self, data: bytes) -> None:
        with pytest.raises(ModelLoadError, match=rf"tokenizer.json \({len(data)} bytes\) cannot be read: "):
            Tokenizer(data)

    def test_a_decoder_that_is_not_known_is_refused(self) -> None:
        with pytest.raises(ModelLoadError, match=r"Regex.*not supported; known are ByteLevel alone"):
            Tokenizer(text_samples.with_regex_decoder())

    def test_from_what_a_worker_sends(self) -> None:
        defaults = worker_pb2.TokenizerDefaults(
            bos_token="<|im_start|>",
            eos_token="<|im_end|>",
            eos_token_ids=[2, 0],
            special_tokens={"pad_token": "<pad>"},
        )
        tokenizer = Tokenizer.from_defaults(byte_level()._backend.to_str().encode(), defaults)
        assert tokenizer.eos_token_ids == {0, 2}
        assert tokenizer.special_tokens == {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<pad>",
        }
        assert tokenizer.token_id("<pad>") is None  # naming a token does not make one

    def test_tokens_named_as_special_are_special(self) -> None:
        plain = Tokenizer(byte_level()._backend.to_str().encode())
        tool = plain.token_id("<tool>")
        assert tool is not None
        assert tool not in plain.special_token_ids
        named = Tokenizer(byte_level()._backend.to_str().encode(), special_tokens={"eos_token": "<tool>"})
        assert named.token_id("<tool>") == tool
        assert named.decode([tool], skip_special_tokens=True) == ""
        assert named.token_spelling(tool) == "<tool>"
        assert named.token_spelling(named.encode("\n")[0]) == "\u010a"
        assert named.token_spelling(1 << 20) == ""

    def test_truncation_and_padding_are_off(self) -> None:
        cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        fill = {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }
        tokenizer = edited(byte_level(), truncation=cut, padding=fill)
        assert tokenizer.encode(HARD_TEXTS[0]) == byte_level().encode(HARD_TEXTS[0])


class TestVocabulary:
    def test_sizes_and_special_tokens(self) -> None:
        tokenizer = byte_level()
        assert tokenizer.vocab_size == 422
        assert tokenizer.special_token_ids == {0, 1, 2}
        assert tokenizer.all_special_tokens == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        assert tokenizer.eos_token_ids == {2}

    def test_single_tokens(self) -> None:
        tokenizer = byte_level()
        half = tokenizer.token_id("Ã")
        assert half is not None
        assert (tokenizer.token_bytes(half), tokenizer.token_text(half)) == (b"\xc3", "\ufffd")
        assert tokenizer.token_text(2) == "<|im_end|>"
        assert tokenizer.token_bytes(10**6) == b""

    @pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace-bytes"])
    def test_single_tokens_are_those_of_the_middle_of_a_text(self, kind: str) -> None:
        tokenizer = text_samples.ALL[kind]()
        space, byte = tokenizer.token_id("▁"), tokenizer.token_id("<0xE5>")
        assert space is not None
        assert byte is not None
        assert tokenizer.token_text(space) == " "
        assert (tokenizer.token_bytes(byte), tokenizer.token_text(byte)) == (b"\xe5", "\ufffd")

    def test_texts_are_split_at_special_tokens(self) -> None:
        assert byte_level().split_special_tokens("a<|im_end|><|im_start|>b") == ["a", 2, 1, "b"]
        assert byte_level().split_special_tokens("<tool>") == ["<tool>"]


class TestEncoding:
    @pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
    @pytest.mark.parametrize("text", HARD_TEXTS)
    def test_there_and_back(self, kind: str, text: str) -> None:
        tokenizer = text_samples.ALL[kind]()
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text

    def test_special_tokens_in_a_text_become_their_ids(self) -> None:
        assert byte_level().encode("<|im_start|><|im_end|>") == [1, 2]

    def test_the_tokenizers_own_special_tokens_can_be_left_out(self) -> None:
        template = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        }
        tokenizer = edited(sentencepiece(), post_processor=template)
        rest = tokenizer.encode("two", add_special_tokens=False)
        assert tokenizer.encode("two") == [1, *rest]
        assert 1 not in rest

    def test_a_lone_surrogate_is_the_callers_mistake(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"lone surrogate, U\+D83D, at character 1") as caught:
            byte_level().encode("a\ud83d")
        assert caught.value.field == "text"

    @pytest.mark.parametrize("bad", [-1, 2**32])
    def test_an_impossible_id_is_the_callers_mistake(self, bad: int) -> None:
        with pytest.raises(InvalidRequestError, match=f"token id {bad} is out of range"):
            byte_level().decode([1, bad], skip_special_tokens=True)

    def test_ids_without_a_token_decode_to_nothing(self) -> None:
        assert byte_level().decode([*byte_level().encode("a"), 5000, 2**32 - 1], skip_special_tokens=True) == "a"

    def test_threads_may_share_a_tokenizer(self) -> None:
        with ThreadPoolExecutor(4) as pool:
            encoded = list(pool.map(byte_level().encode, HARD_TEXTS * 10))
        assert encoded == [byte_level().encode(text) for text in HARD_TEXTS * 10]


class TestMinTokenCount:
    def test_length_over_the_longest_token(self) -> None:
        longest = max(map(len, byte_level()._backend.get_vocab()))  # a character of the vocabulary is a byte
        assert byte_level().min_token_count("a" * longest * 100) == 100
        assert byte_level().min_token_count("a" * (longest * 100 + 1)) == 101
        assert byte_level().min_token_count("é" * longest) == 2
        assert byte_level().min_token_count("") == 0

    @pytest.mark.parametrize("kind", [*sorted(text_samples.ALL), "nfc", "few-bytes", "lstrip"])
    def test_never_more_than_there_are(self, kind: str) -> None:
        lstrip = [{**token, "lstrip": True} for token in json.loads(byte_level()._backend.to_str())["added_tokens"]]
        tokenizer = {
            "nfc": lambda: edited(byte_level(), normalizer={"type": "NFC"}),
            "few-bytes": lambda: byte_level(kept_bytes=60),
            "lstrip": lambda: edited(byte_level(), added_tokens=lstrip),
            **text_samples.ALL,
        }[kind]()

        pieces = st.sampled_from(["a", " ", "é", "e\u0301", "한", "\u1112\u1161\u11ab", "K", "🙂", "<|im_end|>", "\n"])

        @settings(max_examples=200, deadline=None)
        @given(st.lists(st.one_of(pieces, st.text(max_size=3)), max_size=60).map("".join))
        def check(text: str) -> None:
            assert tokenizer.min_token_count(text) <= len(tokenizer.encode(text, add_special_tokens=False))

        check()

    def test_nothing_is_said_where_text_may_be_dropped(self) -> None:
        assert edited(byte_level(), normalizer={"type": "StripAccents"}).min_token_count("a" * 1000) == 0
        assert text_samples.word_level().min_token_count("a" * 1000) == 0

    def test_byte_fallback_counts_characters(self) -> None:
        longest = max(map(len, sentencepiece()._backend.get_vocab()))
        assert sentencepiece().min_token_count("x" * longest * 7) == 7
