"""The prompts of the default model's references: 32 for greedy generation, text or chat, from one token to about 700,
in many scripts; 16 for beam search.

Only the scripts that make the references read this; the tests read the token ids that those wrote.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """A prompt's name and either its raw text or its chat messages, as (role, content) pairs."""

    name: str
    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()


def _chat(name: str, question: str, *turns: tuple[str, str]) -> Prompt:
    """A conversation whose turns come before the question."""
    return Prompt(name, messages=(*turns, ("user", question)))


_HISTORY = """\
The printing press did not arrive all at once. In the workshops along the Rhine, goldsmiths and
engravers had for decades been cutting punches for seals and for the bindings of books, and the wine
makers of the same valleys had long known the screw press. What was new around 1450 was the
combination: a hand-held mould that could be opened and closed in seconds, an alloy of lead, tin and
antimony that filled it without shrinking, an oil-based ink that stuck to metal, and a press that
pushed all of it evenly against damp paper. A single worker could cast some three thousand letters
in a day. A pair of printers could pull two hundred and forty sheets in an hour. Within fifty years
there were presses in more than two hundred and fifty towns, and they had produced something like
twenty million volumes, more than all the scribes of Europe had copied in the thousand years before.
"""

_SOURCE = '''\
class IntervalMap:
    """Maps half-open intervals of integers to values; later writes win."""

    def __init__(self):
        self._starts = [0]
        self._values = [None]

    def set(self, start, end, value):
        if start >= end:
            raise ValueError(f"empty interval [{start}, {end})")
        low = bisect.bisect_left(self._starts, start)
        high = bisect.bisect_right(self._starts, end) - 1
        tail = self._values[high]
        self._starts[low:high + 1] = [start, end]
        self._values[low:high + 1] = [value, tail]

    def get(self, key):
        return self._values[bisect.bisect_right(self._starts, key) - 1]


def test_get():
    numbers = IntervalMap()
    numbers.set(10, 20, "ten")
    numbers.set(  15, 17, "fifteen")
    assert numbers.get(16) == '''

_LIST = "\n".join(f"{i}. item {i} costs {3 * i + 7} dollars and weighs {100 - 2 * i} grams" for i in range(1, 31))

PROMPTS: tuple[Prompt, ...] = (
    Prompt("one_token", "The"),
    Prompt("two_tokens", "Once upon"),
    Prompt("newline", "\n"),
    Prompt("count", "one two three four five six seven eight"),
    Prompt("digits", "3.14159265358979323846 and  2.71828"),
    Prompt("story", "In a small village by the sea there lived an old fisherman who had never learned to swim."),
    Prompt("repetition", "la la la la la la la la la la la la la la la la"),
    Prompt("spaces", "a  b   c    d\t\te\n\n\nf"),
    Prompt("capital", "The capital of Japan is"),
    Prompt("english_400", _HISTORY * 2),
    Prompt("english_700", _HISTORY * 3 + _HISTORY[:508] + "In short, the most important consequence was"),
    Prompt("french", "Il était une fois, dans une forêt lointaine, un renard qui voulait apprendre à lire."),
    Prompt("german", "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist"),
    Prompt("spanish", "¿Dónde está la biblioteca? Mañana por la mañana iremos"),
    Prompt("russian", "Все счастливые семьи похожи друг на друга, каждая несчастливая семья"),
    Prompt("greek", "Ἐν ἀρχῇ ἦν ὁ λόγος, και ο λόγος"),
    Prompt("hebrew", "בראשית ברא אלהים את השמים ואת"),
    Prompt("arabic", "كان يا ما كان في قديم الزمان"),
    Prompt("hindi", "एक समय की बात है, एक गाँव में"),
    Prompt("chinese", "从前有座山，山里有座庙，庙里有个老和尚在讲故事。"),
    Prompt("japanese", "吾輩は猫である。名前はまだ無い。どこで生れたか"),
    Prompt("korean", "옛날 옛적에 호랑이가 담배 피우던 시절에"),
    Prompt("emoji", "😀 😃 😄 😁 😆 😅 😂 🤣 😊 😇"),
    Prompt("flags", "🇫🇷 🇩🇪 🇯🇵 🇧🇷 🇫🇷 🇩🇪 🇯🇵 🇧🇷 🇫🇷 🇩🇪"),
    Prompt("families", "👨‍👩‍👧‍👦 👩‍👩‍👦 👨‍👨‍👧‍👧 👨‍👩‍👧‍👦 👩‍👩‍👦 👨‍👨‍👧‍👧 👨‍👩‍👧‍👦"),
    Prompt("code", _SOURCE),
    Prompt("list", _LIST),
    _chat("chat_capital", "What is the capital of France?"),
    _chat("chat_system", "Who are you?", ("system", "You are a pirate. Answer in one sentence.")),
    _chat(
        "chat_turns",
        "And in kilometres?",
        ("user", "How far is the Moon from the Earth, in miles?"),
        ("assistant", "On average about 238,855 miles."),
    ),
    _chat("chat_code", "Write a Python function that returns the n-th Fibonacci number, without recursion."),
    _chat("chat_emoji", "Translate to English: 我喜欢喝茶。 Then add this flag: 🇨🇳 and this family: 👨‍👩‍👧"),
)


# Short answers, so that beams end well before the 48th token, and some texts that go on.
BEAM_PROMPTS: tuple[Prompt, ...] = (
    Prompt("story", "In a small village by the sea there lived an old fisherman who"),
    _chat("opposite", "What is the opposite of hot?"),
    _chat("follow_up", "And of Spain?", ("user", "What is the capital of Italy?"), ("assistant", "Rome.")),
    _chat("year", "In which year did the Second World War end?"),
    _chat("sum", "What is two plus three?"),
    _chat("sum_digits", "What is 17 + 25?"),
    _chat("formula", "What is the chemical formula of water?"),
    _chat("translate", "Translate to French: good morning"),
    _chat("ocean", "Which is the largest ocean on Earth?"),
    _chat("author", "Who wrote Hamlet?"),
    _chat("animal", "Name one animal that can fly. Answer with one word."),
    _chat("laconic", "How is the weather?", ("system", "You answer with at most five words.")),
    _chat("greeting", "Hello!"),
    _chat("thanks", "Thank you, that is all."),
    _chat("colour", "Name a colour."),
    _chat("code", "Write a Python expression that reverses the list xs. Only the code."),
)
