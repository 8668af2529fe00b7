"""Streamed text equals whole text, and stop strings cut it at the right place, however it was cut into tokens."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError
from octavo_router.text_stream import StopMatcher, TextStream
from octavo_router.tokenizer import Tokenizer
from tests.router import text_samples
from tests.router.text_samples import HARD_TEXTS, byte_level, sentencepiece

KINDS = sorted(text_samples.ALL)


def run(tokenizer: Tokenizer, ids: list[int], **options: object) -> tuple[list[str], str | None, int]:
    """Streams ids. Returns what each take gave, the stop string, and the number of tokens taken."""
    stream = TextStream(tokenizer, **{"skip_special_tokens": True, **options})  # type: ignore[arg-type]
    pieces: list[str] = []
    for count, token_id in enumerate(ids, 1):
        matched = stream.append(token_id)
        pieces.append(stream.take())
        if matched is not None:
            assert stream.take() == ""
            return pieces, matched, count
    matched = stream.finish()
    pieces.append(stream.take())
    return pieces, matched, len(ids)


def first_complete(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where a text ends and by which stop string: the first to be complete, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text.endswith(stop, 0, end)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids, byte tokens and special ones among them, and some that no token has."""
    some = st.integers(0, min(tokenizer.vocab_size, 262) + 1)
    return st.lists(st.one_of(some, st.integers(0, tokenizer.vocab_size + 5), st.integers(0, 2)), max_size=24)


class TestWholeText:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("skip", [True, False])
    def test_any_ids_stream_to_their_decoding(self, kind: str, skip: bool) -> None:
        """Decoding token by token lost the blanks between words, with tokenizers such as Llama's (BR-040)."""
        """The tokenizer's own steps behind decoding were left out (BR-118)."""
        tokenizer = text_samples.ALL[kind]()

        @settings(max_examples=150, deadline=None)
        @given(any_ids(tokenizer))
        def check(ids: list[int]) -> None:
            pieces, _, _ = run(tokenizer, ids, skip_special_tokens=skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)

        check()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("skip", [True, False])
    @pytest.mark.parametrize("spaces", [True, False])
    def test_many_tokens_at_once_are_the_same_text(self, kind: str, skip: bool, spaces: bool) -> None:
        tokenizer = text_samples.ALL[kind]()
        source = random.Random(2)
        for _ in range(50):
            ids = [source.randrange(min(tokenizer.vocab_size, 300) + 2) for _ in range(12)]
            options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
            pieces, _, _ = run(tokenizer, ids, **options)
            *pieces, end = pieces
            stream = TextStream(tokenizer, **options)  # type: ignore[arg-type]
            taken = ""
            for begin in range(0, len(ids), 5):
                stream.extend(ids[begin : begin + 5])
                taken += stream.take()
                assert taken == "".join(pieces[: begin + 5])
            stream.finish()
            assert stream.take() == end

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_is_released_never_changes(self, kind: str) -> None:
        tokenizer = text_samples.ALL[kind]()
        source = random.Random(1)
        for _ in range(100):
            ids = [source.randrange(tokenizer.vocab_size) for _ in range(12)]
            pieces, _, _ = run(tokenizer, ids)
            for count in range(len(ids)):
                released = "".join(pieces[: count + 1])
                whole = tokenizer.decode(ids[: count + 1], skip_special_tokens=True)
                assert whole.startswith(released)

    @pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
    @pytest.mark.parametrize("text", HARD_TEXTS)
    def test_texts_come_back(self, kind: str, text: str) -> None:
        tokenizer = text_samples.ALL[kind]()
        pieces, _, _ = run(tokenizer, tokenizer.encode(text, add_special_tokens=False))
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)

    def test_a_character_waits_for_its_last_byte(self) -> None:
        tokenizer = byte_level()
        ids = [tokenizer.token_id(char) for char in "ðŁĻĤ"]  # the four bytes of U+1F642
        pieces, _, _ = run(tokenizer, ids)  # type: ignore[arg-type]
        assert pieces == ["", "", "", "🙂", ""]

    def test_an_unfinished_character_is_one_replacement_character(self) -> None:
        tokenizer = byte_level()
        ids = [tokenizer.token_id(char) for char in "aðŁĻ"]
        pieces, _, _ = run(tokenizer, ids)  # type: ignore[arg-type]
        assert pieces == ["a", "", "", "", "\ufffd"]

    def test_a_byte_fallback_run_waits_for_its_end_and_fails_as_a_whole(self) -> None:
        tokenizer = sentencepiece()
        run_of = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "é".encode()]
        word = tokenizer.token_id("a")
        pieces, _, _ = run(tokenizer, [*run_of, word])  # type: ignore[list-item]
        assert pieces == ["", "", "éa", ""]
        pieces, _, _ = run(tokenizer, [*run_of, tokenizer.token_id("<0xFF>"), word])  # type: ignore[list-item]
        assert pieces == ["", "", "\ufffd\ufffd\ufffd", "a", ""]

    def test_leading_space_of_a_byte_level_text_is_kept(self) -> None:
        tokenizer = byte_level()
        pieces, _, _ = run(tokenizer, tokenizer.encode(" capital"))
        assert "".join(pieces).startswith(" c")

    def test_take_may_come_at_any_time(self) -> None:
        tokenizer = byte_level()
        ids = tokenizer.encode(HARD_TEXTS[2])
        source = random.Random(2)
        for _ in range(20):
            stream = TextStream(tokenizer, skip_special_tokens=True, stop=["never"])
            pieces = []
            for token_id in ids:
                assert stream.append(token_id) is None
                if source.random() < 0.3:
                    pieces.append(stream.take())
            assert stream.finish() is None
            pieces.append(stream.take())
            assert "".join(pieces) == HARD_TEXTS[2]


class TestSpecialTokens:
    def test_no_space_between_special_tokens_unless_asked_for(self) -> None:
        ids = [1, 2, 2, *byte_level().encode("Hi"), 2, 1]
        for spaces, text in [
            (False, "<|im_start|><|im_end|><|im_end|>Hi<|im_end|><|im_start|>"),
            (True, "<|im_start|> <|im_end|> <|im_end|>Hi<|im_end|> <|im_start|>"),
        ]:
            options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
            pieces, _, _ = run(byte_level(), ids, **options)
            assert "".join(pieces) == text
            assert byte_level().decode(ids, **options) == text

    def test_special_tokens_that_are_asked_for_are_shown_and_no_others(self) -> None:
        ids = [1, *byte_level().encode("Hi"), 2]
        pieces, _, _ = run(byte_level(), ids, shown_special_ids=frozenset({1}))
        assert "".join(pieces) == "<|im_start|>Hi"
        pieces, matched, _ = run(byte_level(), [0, 1, 2], shown_special_ids=frozenset({1}), stop=["im_start|>"])
        assert ("".join(pieces), matched) == ("<|", "im_start|>")

    def test_spaces_change_nothing_where_special_tokens_are_left_out(self) -> None:
        pieces, _, _ = run(byte_level(), [1, 2, *byte_level().encode("Hi")], spaces_between_special_tokens=True)
        assert "".join(pieces) == "Hi"


class TestStop:
    @pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
    @pytest.mark.parametrize("text", HARD_TEXTS)
    @pytest.mark.parametrize("include", [False, True])
    def test_every_slice_of_a_text_stops_it_there(self, kind: str, text: str, include: bool) -> None:
        tokenizer = text_samples.ALL[kind]()
        ids = tokenizer.encode(text, add_special_tokens=False)
        for start, length in itertools.product(range(len(text)), (1, 3, 7)):
            stop = text[start : start + length]
            pieces, matched, count = run(tokenizer, ids, stop=[stop], include_stop=include)
            expected = text[: text.index(stop)] + (stop if include else "")
            assert ("".join(pieces), matched) == (expected, stop)
            # The token that completed the stop string was the last one needed.
            assert stop in tokenizer.decode(ids[:count], skip_special_tokens=True)
            assert stop not in tokenizer.decode(ids[: count - 1], skip_special_tokens=True)

    @settings(max_examples=200, deadline=None)
    @given(
        text=st.text("ab🙂 \n", max_size=20),
        stops=st.lists(st.text("ab🙂 \n", min_size=1, max_size=4), min_size=1, max_size=3),
        cut=st.randoms(use_true_random=False),
        include=st.booleans(),
    )
    @example(text="xabcd", stops=["abcd", "bc"], cut=random.Random(0), include=False)
    def test_how_the_text_is_cut_into_tokens_does_not_matter(
        self, text: str, stops: list[str], cut: random.Random, include: bool
    ) -> None:
        tokenizer = byte_level()
        ids: list[int] = []
        rest = text
        while rest:
            size = cut.randint(1, len(rest))
            ids += tokenizer.encode(rest[:size])
            rest = rest[size:]
        pieces, matched, _ = run(tokenizer, ids, stop=stops, include_stop=include)
        found = first_complete(text, stops)
        if found is None:
            assert ("".join(pieces), matched) == (text, None)
        else:
            start, stop = found
            assert ("".join(pieces), matched) == (text[:start] + (stop if include else ""), stop)

    def test_the_beginning_of_a_stop_string_is_held_back_and_no_more(self) -> None:
        tokenizer = byte_level()
        ids = [tokenizer.token_id(char) for char in "xababyz"]
        pieces, _, _ = run(tokenizer, ids, stop=["ababc"])  # type: ignore[arg-type]
        assert pieces == ["x", "", "", "", "", "ababy", "z", ""]

    def test_of_two_that_end_together_the_longer_counts(self) -> None:
        pieces, matched, _ = run(byte_level(), byte_level().encode("one two three"), stop=["two", "one two"])
        assert ("".join(pieces), matched) == ("", "one two")

    def test_a_stop_string_in_a_byte_fallback_run_stops_at_once(self) -> None:
        tokenizer = sentencepiece()
        newline = tokenizer.token_id("<0x0A>")
        assert newline is not None
        ids = [*tokenizer.encode("a", add_special_tokens=False), newline, newline, newline]
        pieces, matched, count = run(tokenizer, ids, stop=["\n\n"])
        assert ("".join(pieces), matched, count) == ("a", "\n\n", len(ids) - 1)

    def test_a_held_back_beginning_is_released_at_the_end(self) -> None:
        pieces, matched, _ = run(byte_level(), byte_level().encode("Paris is"), stop=["is not"])
        assert ("".join(pieces), matched) == ("Paris is", None)

    def test_a_stop_string_that_may_not_stop_is_text_and_a_later_one_counts(self) -> None:
        tokenizer = byte_level()
        stream = TextStream(tokenizer, skip_special_tokens=True, stop=["aba"])
        matches = []
        for number, char in enumerate("ababaz"):
            token_id = tokenizer.token_id(char)
            assert token_id is not None
            matches.append(stream.append(token_id, may_stop=number >= 3))
            if matches[-1] is not None:
                break
        # "aba" is complete at the third character, where it does not count, and again at the fifth, where it does.
        assert matches == [None, None, None, None, "aba"]
        assert stream.take() == "ab"

    def test_a_stop_string_at_the_end_that_may_not_stop_is_text(self) -> None:
        tokenizer = sentencepiece()
        newline = tokenizer.token_id("<0x0A>")
        assert newline is not None
        stream = TextStream(tokenizer, skip_special_tokens=True, stop=["\n"])
        assert stream.append(newline, may_stop=False) is None
        assert stream.finish(may_stop=False) is None
        assert stream.take() == "\n"

    @pytest.mark.parametrize("stop", ["", "a\ud800"])
    def test_a_stop_string_that_no_text_contains_is_refused(self, stop: str) -> None:
        with pytest.raises(InvalidRequestError, match="stop has") as caught:
            TextStream(byte_level(), skip_special_tokens=True, stop=["x", stop])
        assert caught.value.field == "stop.stop"


class TestStopAtSpecialTokens:
    def hello(self, *more: int) -> list[int]:
        return [*byte_level().encode("Hello."), *more]

    @pytest.mark.parametrize("include", [False, True])
    @pytest.mark.parametrize("skip", [False, True])
    def test_a_special_token_is_matched_by_its_spelling(self, skip: bool, include: bool) -> None:
        ids = self.hello(2, *byte_level().encode("more"))
        options = {"skip_special_tokens": skip, "include_stop": include, "stop": ["<|im_end|>"]}
        pieces, matched, count = run(byte_level(), ids, **options)
        assert "".join(pieces) == ("Hello.<|im_end|>" if include else "Hello.")
        assert matched == "<|im_end|>"
        assert ids[count - 1] == 2

    def test_a_spelling_in_plain_characters_matches_too(self) -> None:
        plain = [token for char in "<|im_end|>" for token in byte_level().encode(char)]
        pieces, matched, _ = run(byte_level(), self.hello(*plain), stop=["<|im_end|>"])
        assert ("".join(pieces), matched) == ("Hello.", "<|im_end|>")

    def test_a_hidden_token_is_matched_only_whole(self) -> None:
        pieces, matched, _ = run(byte_level(), self.hello(2, *byte_level().encode("x")), stop=["end|>", "|>x"])
        assert ("".join(pieces), matched) == ("Hello.x", None)

    def test_text_around_the_token_belongs_to_the_stop_string(self) -> None:
        stop = "lo.<|im_end|>\n<|im_start|>"
        ids = self.hello(2, *byte_level().encode("\n"), 1)
        pieces, matched, _ = run(byte_level(), ids, stop=[stop])
        assert ("".join(pieces), matched) == ("Hel", stop)
        pieces, matched, _ = run(byte_level(), ids, stop=[stop], include_stop=True)
        assert ("".join(pieces), matched) == ("Hel" + stop, stop)
        pieces, matched, _ = run(byte_level(), ids[:-1], stop=[stop])
        assert ("".join(pieces), matched) == ("Hello.\n", None)

    def test_text_across_a_hidden_token_is_still_seen(self) -> None:
        ids = [*byte_level().encode("He"), 2, *byte_level().encode("llo")]
        pieces, matched, _ = run(byte_level(), ids, stop=["ell", "<|im_end|>x"])
        assert ("".join(pieces), matched) == ("H", "ell")

    def test_an_unfinished_character_before_the_token_ends_with_it(self) -> None:
        tokenizer = byte_level()
        half = [tokenizer.token_id(char) for char in "åı"]  # two bytes of U+53EB
        pieces, matched, count = run(tokenizer, [*half, 2, 2], stop=["<|im_end|>"])  # type: ignore[list-item]
        assert ("".join(pieces), matched, count) == ("\ufffd", "<|im_end|>", 3)

    @pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
    def test_a_token_amid_a_character_stands_behind_it(self, kind: str) -> None:
        tokenizer = text_samples.ALL[kind]()
        end = tokenizer.all_special_tokens[2]
        spell = {"byte-level": "åı«"}.get(kind) or [f"<0x{byte:02X}>" for byte in "叫".encode()]
        first, second, third = (tokenizer.token_id(token) for token in spell)
        after = tokenizer.encode("x", add_special_tokens=False)[-1]
        ids = [first, second, 2, third, after]
        pieces, matched, _ = run(tokenizer, ids, stop=[f"{end}x"])  # type: ignore[arg-type]
        assert ("".join(pieces), matched) == ("叫", f"{end}x")
        pieces, matched, _ = run(tokenizer, ids, stop=[f"{end}y"])  # type: ignore[arg-type]
        assert ("".join(pieces), matched) == (tokenizer.decode(ids, skip_special_tokens=True), None)  # type: ignore[arg-type]

    @pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace-bytes"])
    def test_marks_never_reach_the_text(self, kind: str) -> None:
        tokenizer = text_samples.ALL[kind]()
        stops = [f"{token}never" for token in tokenizer.all_special_tokens]

        @settings(max_examples=150, deadline=None)
        @given(any_ids(tokenizer))
        def check(ids: list[int]) -> None:
            pieces, matched, _ = run(tokenizer, ids, stop=stops)
            assert ("".join(pieces), matched) == (tokenizer.decode(ids, skip_special_tokens=True), None)

        check()


def test_another_text_has_the_settings_and_nothing_of_the_text() -> None:
    tokenizer = byte_level()
    first = TextStream(tokenizer, skip_special_tokens=True, stop=["aba", "<|im_end|>!"])
    for token_id in tokenizer.encode("xab"):
        first.append(token_id)
    second = first.begin_another()
    ids = tokenizer.encode("aXaba")
    assert [second.append(token_id) for token_id in ids][-1] == "aba"
    assert second.take() == "aX"
    assert first.append(tokenizer.encode("a")[0]) == "aba"
    assert first.take() == "x"
    assert second._plain is not None
    assert first._plain is not None
    assert second._plain._goto is first._plain._goto, "what stop strings are looked for with is made once"


class TestStopMatcher:
    @settings(max_examples=150, deadline=None)
    @given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
    def test_first_match_and_what_is_kept(self, text: str, patterns: list[str]) -> None:
        matcher = StopMatcher({pattern: pattern for pattern in patterns})
        for end, char in enumerate(text, 1):
            seen = text[:end]
            if matcher.advance(char) is not None:
                assert first_complete(seen, patterns) == (end - matcher.match_length, matcher.match)
                return
            assert first_complete(seen, patterns) is None
            beginnings = [p[:size] for p in patterns for size in range(len(p)) if seen.endswith(p[:size])]
            assert matcher.num_kept == max(map(len, beginnings))
