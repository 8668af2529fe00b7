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
from octavo.process import ProcessPair
from octavo.program import ProgramSpec


@pytest.fixture
def stand_ins(programs: tuple[ProgramSpec, ProgramSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes LLM start the stand-ins instead of the real programs."""
    monkeypatch.setattr("octavo.own_pair.ProcessPair", functools.partial(ProcessPair, programs=programs))


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
    with pytest.raises(TypeError, match="tensor_parallel_size only as 1, and it is 2: one worker"):
        LLM("m", tensor_parallel_size=2)
    with pytest.raises(TypeError, match="no setting 'port'"):
        LLM("m", port=8000)
    with pytest.raises(ConfigError, match="block_size is 17"):
        LLM("m", block_size=17)


def test_a_model_that_cannot_be_loaded_is_told(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER", "exit:2:octavo-worker: no model 'm'")
    with pytest.raises(StartError, match=r"^no model 'm'$"):
        LLM("m")


def test_a_seed_is_spread_over_the_requests_of_all_calls(stand_ins: None) -> None:
    with LLM("m", seed=1) as llm:
        sent = llm._pairs(["a", "b", "c"], [SamplingParams(), SamplingParams(seed=5), SamplingParams()])
    assert [params.seed for _, params in sent] == [10451216379200822465, 5, 17911839290282890590]


def test_the_engine_prints_its_statistics_in_one_line(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.llm_engine.stat_logger.print_stats()
    llm.llm_engine.do_log_stats()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("Avg prompt throughput: 0.0 tokens/s, ") for line in lines)
    assert llm.llm_engine is llm.llm_engine
    assert (llm.llm_engine.model_config.model, llm.llm_engine.get_model_config().max_model_len) == ("fake", 100)


def test_the_tokenizer_is_the_servers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("hi") == [104, 105]
    assert tokenizer.decode([104, 105]) == "hi"
    assert tokenizer.decode(104) == "h"
    conversation = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(conversation, add_generation_prompt=True) == [104, 105]
    assert tokenizer.apply_chat_template(conversation, tokenize=False, enable_thinking=False) == "hi"


def test_an_engine_does_not_keep_its_model(stand_ins: None) -> None:
    llm = LLM("m")
    engine = llm.llm_engine
    del llm
    gc.collect()
    with pytest.raises(RequestCancelledError, match="the LLM of this engine is gone"):
        engine.do_log_stats()


def test_options_that_are_none_are_the_same_as_left_out(llm: LLM) -> None:
    one = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(
        one,
        SamplingParams(),
        use_tqdm=False,
        chat_template=None,  # type: ignore[typeddict-item]
        tools=None,  # type: ignore[typeddict-item]
        add_generation_prompt=True,
        continue_final_message=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert output.outputs[0].text == "HELLO"
    assert llm.generate("a", use_tqdm=False, priority=None)[0].outputs[0].text == "A"  # type: ignore[typeddict-item]


def test_the_end_of_the_program_stops_the_programs(programs: tuple[ProgramSpec, ProgramSpec]) -> None:
    code = f"""
import functools, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import octavo.llm, octavo.own_pair
from tests.clients.conftest import PROGRAMS
octavo.own_pair.ProcessPair = functools.partial(octavo.own_pair.ProcessPair, programs=PROGRAMS)
llm = octavo.llm.LLM("m")
print(llm.generate("bye", use_tqdm=False)[0].outputs[0].text, llm.address)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    text, address = done.stdout.split()
    assert text == "BYE"
    assert not Path(address.removeprefix("unix:")).parent.exists()
    assert "worker | worker says goodbye" in done.stderr
