from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

from octavo import LLM, SamplingParams
from octavo.client import Client
from octavo.errors import ConfigError, InvalidRequestError, RequestCancelledError, StartError
from octavo.llm import _derived_seed
from octavo.process import ProcessPair
from octavo.program import ProgramSpec


@pytest.fixture
def stand_ins(programs: tuple[ProgramSpec, ProgramSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes LLM start the stand-ins instead of the real programs."""
    monkeypatch.setattr("octavo.llm.ProcessPair", functools.partial(ProcessPair, programs=programs))


@pytest.fixture
def llm(stand_ins: None) -> Iterator[LLM]:
    with LLM("m", max_num_seqs=4) as llm:
        yield llm


def test_prompts_in_every_form(llm: LLM) -> None:
    def texts(prompts: object) -> list[str]:
        return [output.outputs[0].text for output in llm.generate(prompts, use_tqdm=False)]  # type: ignore[arg-type]

    assert texts("hello") == ["HELLO"]
    assert texts(["a", "b"]) == ["A", "B"]
    assert texts([104, 105]) == ["HI"]
    assert texts({"prompt_token_ids": [104]}) == ["H"]
    assert texts([[104], {"prompt": "x"}, "y"]) == ["H", "X", "Y"]
    assert texts([]) == []
    many = [f"prompt {i}" for i in range(30)]
    assert texts(many) == [prompt.upper()[:16] for prompt in many]


def test_one_set_of_parameters_or_one_for_each(llm: LLM) -> None:
    outputs = llm.generate(["abc", "abc"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)], use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["A", "AB"]
    with pytest.raises(InvalidRequestError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)


def test_without_parameters_sixteen_tokens_come(llm: LLM) -> None:
    assert llm.generate("a" * 20, use_tqdm=False)[0].outputs[0].text == "A" * 16


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    one = [{"role": "user", "content": "hello"}]
    assert [output.outputs[0].text for output in llm.chat(one, use_tqdm=False)] == ["HELLO"]
    several = [one, [{"role": "user", "content": "bye"}]]
    assert [output.outputs[0].text for output in llm.chat(several, use_tqdm=False)] == ["HELLO", "BYE"]


def test_progress_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"])
    assert "2/2" in capsys.readouterr().err


def test_works_under_a_running_event_loop(llm: LLM) -> None:
    async def cell() -> str:
        return llm.generate("hello", use_tqdm=False)[0].outputs[0].text

    assert asyncio.run(cell()) == "HELLO"


def test_an_error_names_the_prompt_and_leaves_the_model_usable(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens is -1") as error:
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(max_tokens=-1)], use_tqdm=False)
    assert error.value.__notes__ == ["in prompt 1 of 2, counted from 0"]
    assert llm.generate("a", use_tqdm=False)[0].outputs[0].text == "A"


def test_ctrl_c_cancels_and_leaves_the_model_usable(llm: LLM) -> None:
    class PressingCtrlC(tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            if self.n == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return super().update(n)

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 5000, use_tqdm=PressingCtrlC)
    assert llm.generate("a", use_tqdm=False)[0].outputs[0].text == "A"


def test_a_router_that_dies_is_outlived(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "die"
    marker.touch()
    monkeypatch.setenv("FAKE_ROUTER", f"dies:{marker}")
    prompts = [f"prompt {index}" for index in range(30)]
    with LLM("m", max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [prompt.upper() for prompt in prompts]
    assert "router was killed by SIGKILL; starting it again" in capfd.readouterr().err


def test_a_call_ends_when_nobody_will_ever_answer(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker = tmp_path / "die"
    marker.touch()
    monkeypatch.setenv("FAKE_ROUTER", f"dies:{marker}")
    with LLM("m") as llm:
        monkeypatch.setenv("FAKE_ROUTER", "exit")
        with pytest.raises(StartError, match="no address"):
            llm.generate("x", use_tqdm=False)


def test_others_can_connect_and_ask_for_the_state(llm: LLM) -> None:
    assert llm.state().version == "1.2.3"
    assert llm.flush_prefix_cache() == 5
    with Client(llm.address) as client:
        assert client.health()


def test_closed_model_says_so(stand_ins: None) -> None:
    llm = LLM("m")
    folder = Path(llm.address.removeprefix("unix:")).parent
    llm.close()
    llm.close()
    assert not folder.exists()
    with pytest.raises(RequestCancelledError, match="closed"):
        llm.generate("a")


def test_a_dropped_model_stops_its_programs(stand_ins: None) -> None:
    llm = LLM("m")
    folder = Path(llm.address.removeprefix("unix:")).parent
    del llm
    gc.collect()
    assert not folder.exists()


def test_wrong_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="no setting 'enforce_eager'"):
        LLM("m", enforce_eager=True)
    with pytest.raises(TypeError, match="no setting 'port'"):
        LLM("m", port=8000)
    with pytest.raises(ConfigError, match="block_size is 17"):
        LLM("m", block_size=17)


def test_a_model_that_cannot_be_loaded_is_told(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER", "exit:2:octavo-worker: no model 'm'")
    with pytest.raises(StartError, match=r"^no model 'm'$"):
        LLM("m")


def test_a_seed_gives_each_request_its_own_and_the_same_again(stand_ins: None) -> None:
    def seeds(llm: LLM) -> list[int | None]:
        sent = llm._pairs(["a", "b", "c"], [SamplingParams(), SamplingParams(seed=5), SamplingParams()])
        return [params.seed for _, params in sent]

    with LLM("m", seed=1) as first, LLM("m", seed=1) as second:
        drawn = seeds(first)
        assert drawn == seeds(second)
    assert drawn[1] == 5
    # SplitMix64 from state 1: its first three outputs, of which the second is skipped for the request's own seed.
    assert [_derived_seed(1, position) for position in range(3)] == [
        10451216379200822465,
        13757245211066428519,
        17911839290282890590,
    ]
    assert (drawn[0], drawn[2]) == (10451216379200822465, 17911839290282890590)


def test_the_end_of_the_program_stops_the_programs(programs: tuple[ProgramSpec, ProgramSpec]) -> None:
    code = f"""
import functools, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import octavo.llm
from tests.clients.conftest import PROGRAMS
octavo.llm.ProcessPair = functools.partial(octavo.llm.ProcessPair, programs=PROGRAMS)
llm = octavo.llm.LLM("m")
print(llm.generate("bye", use_tqdm=False)[0].outputs[0].text, llm.address)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    text, address = done.stdout.split()
    assert text == "BYE"
    assert not Path(address.removeprefix("unix:")).parent.exists()
    assert "worker | worker says goodbye" in done.stderr
