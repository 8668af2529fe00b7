"""Both ends of the protocol by which peers are asked."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from sides import PeerSide, SideError

from tests.benchmarks.conftest import BENCHMARKS

PEER = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS / "peers")!r})
from protocol import Peer, serve

def generate(prompts, num_tokens):
    print("libraries print as they please")
    if num_tokens == 13:
        raise ValueError("unlucky")
    return 1 if num_tokens == 7 else len(prompts) * num_tokens

def load(path, dtype, threads):
    return Peer("fake", {{"fake": "1.0"}}, f"{{path.name}} in {{dtype}} by {{threads}}", generate)

serve("A peer.", load)
"""


@pytest.fixture
def side(tmp_path: Path) -> Iterator[PeerSide]:
    script = tmp_path / "fake_peer.py"
    script.write_text(textwrap.dedent(PEER))
    side = PeerSide("fake", script, Path(sys.executable), tmp_path / "model.gguf", "bfloat16", 2)
    yield side
    side.close()


def test_a_peer_describes_itself_and_generates(side: PeerSide) -> None:
    assert (side.about, side.versions) == ("model.gguf in bfloat16 by 2", {"fake": "1.0"})
    assert side.start_s > 0
    assert side.run([[1, 2], [3, 4]], 5).seconds >= 0


def test_a_peer_that_makes_another_number_of_tokens_is_refused(side: PeerSide) -> None:
    with pytest.raises(SideError, match="fake generated 1 tokens, not 7"):
        side.run([[1]], 7)


def test_a_peer_that_fails_is_quoted(side: PeerSide) -> None:
    with pytest.raises(SideError, match=r"fake ended with code 1; the end of its log:\n(?s:.*)ValueError: unlucky"):
        side.run([[1]], 13)
