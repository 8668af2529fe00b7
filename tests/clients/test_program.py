from __future__ import annotations

import pytest

from octavo.errors import StartError
from octavo.program import Program, ProgramSpec, check_installed, child_environment

SPEC = ProgramSpec("worker", "fake_worker_program", "octavo-worker")


def test_children_do_not_read_the_settings_from_the_environment_again() -> None:
    environment = child_environment({"OCTAVO_DTYPE": "float32", "OCTAVO_OTHER": "1", "HOME": "/home"}, {})
    assert environment == {"OCTAVO_OTHER": "1", "HOME": "/home", "PYTHONUNBUFFERED": "1"}


def test_children_read_their_secrets_from_the_environment() -> None:
    environment = child_environment({"OCTAVO_API_KEY": "the parent's"}, {"OCTAVO_API_KEY": "the child's"})
    assert environment["OCTAVO_API_KEY"] == "the child's"


def test_a_program_passes_its_log_on_and_ends(programs: object) -> None:
    lines: list[tuple[str, str]] = []
    program = Program(SPEC, ["--a=1"], lambda name, line: lines.append((name, line)))
    while not lines:
        assert program.exit_code() is None
    program.terminate()
    assert program.wait(10)
    assert program.exit_code() == 0
    assert program.describe_exit() == "exited with code 0"
    assert lines == [("worker", "worker flags: --a=1"), ("worker", "worker says goodbye")]
    assert program.last_lines() == ["worker flags: --a=1", "worker says goodbye"]


def test_a_killed_program_says_so(programs: object) -> None:
    program = Program(SPEC, [], lambda name, line: None)
    assert not program.wait(0.01)
    program.kill()
    assert program.wait(10)
    assert program.exit_code() == -9
    assert program.describe_exit() == "was killed by SIGKILL"
    program.kill()
    program.terminate()


def test_a_missing_module_names_its_distribution() -> None:
    with pytest.raises(StartError, match="octavo-worker is not installed") as error:
        check_installed(ProgramSpec("worker", "octavo_no_such_module", "octavo-worker"))
    assert error.value.exit_code == 2
