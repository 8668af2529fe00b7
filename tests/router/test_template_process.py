"""Templates of requests: real children, hostile templates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.errors import InvalidRequestError, UnavailableError
from octavo_router import template_process
from octavo_router.template_process import MAX_SOURCE_LENGTH, TemplateProcesses

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    processes = TemplateProcesses({"bos_token": "<s>"}, timeout_s=1.0)
    yield processes
    processes.close()


def render(processes: TemplateProcesses, source: str, **options: Any) -> str:
    return processes.render(source, MESSAGES, **{"add_generation_prompt": False, **options})


def test_a_template_sees_what_the_models_own_sees(processes: TemplateProcesses) -> None:
    source = (
        "{{ bos_token }}{{ messages[0].content }}{{ tools | tojson }}{{ x }}{% if add_generation_prompt %}>{% endif %}"
    )
    text = render(processes, source, add_generation_prompt=True, tools=[{"name": "f"}], variables={"x": 5})
    assert text == '<s>hi[{"name": "f"}]5>'


def test_text_of_every_script(processes: TemplateProcesses) -> None:
    messages = [{"role": "user", "content": "día\n\u2028日本 \U0001f600 \udcff"}]
    text = processes.render("{{ messages[0].content }}", messages, add_generation_prompt=False)
    assert text == messages[0]["content"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ x", "the chat template is not Jinja"),
        ("{{ raise_exception('no system role') }}", "the chat template refused the messages: no system role"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ cycler.__init__.__globals__.os.environ }}", "is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for i in range(10**12) %}x{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1000000 steps"),
        ("{{ 'a'.ljust(10**10) }}", "needs more memory than it may have"),
        ("{{ '%999999999d' % 1 }}", "needs more memory than it may have"),
        ("{{ ('a' * 60000000).replace('a', 'bb' * 1000) | length }}", "needs more memory than it may have"),
        ("{{ 'a' * 20000000 }}", "wrote more than 16777216 characters"),
        ("{% for i in range(99999) %}{% if ('a' * 10000000) | upper %}{% endif %}{% endfor %}", "takes more than 1 s"),
    ],
)
def test_what_a_template_may_not_do(processes: TemplateProcesses, source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(processes, source)
    assert message in caught.value.message
    assert caught.value.field == "chat.chat_template"
    assert render(processes, "{{ messages[0].content }}") == "hi"


def test_a_template_that_is_too_long(processes: TemplateProcesses) -> None:
    with pytest.raises(InvalidRequestError, match="has 262145 characters; at most 262144 are taken"):
        render(processes, "x" * (MAX_SOURCE_LENGTH + 1))


def test_messages_that_are_wrong_keep_their_field(processes: TemplateProcesses) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        processes.render("x", [], add_generation_prompt=False)
    assert caught.value.field == "chat.messages"


def test_many_at_a_time(processes: TemplateProcesses) -> None:
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(lambda number: render(processes, f"{number}" + "{{ bos_token }}"), range(30)))
    assert texts == [f"{number}<s>" for number in range(30)]


def test_a_child_has_no_secrets(processes: TemplateProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    popen = template_process.subprocess.Popen

    def note(*arguments: Any, **options: Any) -> Any:
        started.append(options["env"])
        return popen(*arguments, **options)

    monkeypatch.setenv("OCTAVO_API_KEY", "hush")
    monkeypatch.setattr(template_process.subprocess, "Popen", note)
    own = TemplateProcesses({})
    assert render(own, "x") == "x"
    own.close()
    assert not any("OCTAVO" in name for name in started[0])


def test_a_child_that_the_system_killed_is_replaced() -> None:
    processes = TemplateProcesses({})
    render(processes, "x")
    child = processes._idle.queue[0]
    os.kill(child._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child._process.pid, os.WEXITED | os.WNOWAIT)
    assert render(processes, "x") == "x"
    processes.close()


def test_a_child_that_does_not_start_is_not_the_requests_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process.sys, "executable", "/bin/false")
    with pytest.raises(UnavailableError, match="does not start: it ended at once"):
        render(TemplateProcesses({}), "x")
    monkeypatch.setattr(template_process.sys, "executable", "/no/such")
    with pytest.raises(UnavailableError, match="does not start: No such file"):
        render(TemplateProcesses({}), "x")


def test_a_child_without_an_owner_ends_by_itself() -> None:
    endless = "{% for i in range(99999) %}{% if ('a' * 10000000) | upper %}{% endif %}{% endfor %}"
    request = {
        "source": endless,
        "special_tokens": {},
        "messages": MESSAGES,
        "options": {"add_generation_prompt": False},
    }
    program = "from octavo_router.template_process import main; main(max_cpu_s=0.2)"
    ended = subprocess.run([sys.executable, "-c", program], input=json.dumps(request).encode(), timeout=60)
    assert ended.returncode == -signal.SIGPROF


def test_children_end_with_their_owner() -> None:
    processes = TemplateProcesses({})
    render(processes, "x")
    child = processes._idle.queue[0]
    processes.close()
    assert child._process.returncode is not None
