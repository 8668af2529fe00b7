from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.authentication import KeyRing, bearer, is_loopback, read_keys, worker_token
from octavo.config import RouterConfig, WorkerConfig
from octavo.errors import ConfigError


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a key file."""

    def write(text: str) -> Path:
        path = tmp_path / "keys"
        path.write_text(text)
        return path

    return write


def test_without_keys_nobody_is_asked() -> None:
    assert not KeyRing()
    assert KeyRing(["a"])


@pytest.mark.parametrize("key", ["first", "second"])
def test_every_key_is_good(key: str) -> None:
    assert KeyRing(["first", "second"]).accepts(bearer(key))


@pytest.mark.parametrize(
    "authorization",
    ["", "first", "Bearer", "Bearer ", "Bearer firs", "Bearer first2", "Bearer FIRST", "Basic first", "Bearer \udcff"],
)  # fmt: skip
def test_anything_else_is_not(authorization: str) -> None:
    assert not KeyRing(["first"]).accepts(authorization)


@pytest.mark.parametrize("authorization", ["bearer first", "BEARER first", "Bearer   first ", " Bearer first"])
def test_the_scheme_in_any_case_and_spaces(authorization: str) -> None:
    assert KeyRing(["first"]).accepts(authorization)


def test_every_key_is_compared_whichever_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(left == right)
        return left == right

    monkeypatch.setattr("hmac.compare_digest", compare)
    keys = KeyRing(["a", "b", "c"])
    for key in ("a", "c", "none"):
        keys.accepts(bearer(key))
    assert compared == [True, False, False, False, False, True, False, False, False]


def test_a_key_file_has_comments_and_empty_lines(file: Callable[[str], Path]) -> None:
    text = "# team one\nalpha\n\n  beta  # until May\n#gamma\n  # delta\nwith#in\n"
    assert read_keys(file(text)) == ["alpha", "beta", "with#in"]


@pytest.mark.parametrize("content", ["alpha beta", "al,pha", "schlüssel", "tab\tkey"])
def test_a_line_that_is_no_key_is_named_but_not_shown(file: Callable[[str], Path], content: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2 of api_key_file \S+ must be printable ASCII") as caught:
        read_keys(file(f"good\n{content}\n"))
    assert content not in caught.value.message


def test_a_file_without_keys_or_no_file_is_refused_at_start(file: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="holds no key"):
        KeyRing([], str(file("# none yet\n")))
    with pytest.raises(ConfigError, match="api_key_file /no/such cannot be read: No such file"):
        KeyRing(["a"], "/no/such")


def test_a_changed_file_is_read_again(file: Callable[[str], Path]) -> None:
    clock = Clock()
    path = file("old")
    keys = KeyRing(["given"], str(path), clock=clock)
    path.write_text("new-one\nnew-two\n")
    assert keys.accepts(bearer("old"))  # it was looked at a moment ago
    clock.now = 1.0
    assert [keys.accepts(bearer(key)) for key in ("old", "new-one", "new-two", "given")] == [False, True, True, True]
    path.write_text("")
    clock.now = 2.0
    assert keys
    assert [keys.accepts(bearer(key)) for key in ("new-one", "given", "")] == [False, True, False]


def test_a_file_that_became_unreadable_leaves_its_keys(
    file: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    path = file("old")
    keys = KeyRing([], str(path), clock=clock)
    path.unlink()
    with caplog.at_level(logging.ERROR):
        for clock.now in (1.0, 2.0, 3.0):
            assert keys.accepts(bearer("old"))
    (record,) = caplog.records  # told once
    assert "cannot be read: No such file or directory; the keys it held before stay good" in record.message
    file("newer")
    clock.now = 4.0
    assert keys.accepts(bearer("newer"))
    assert not keys.accepts(bearer("old"))


def test_a_file_that_may_be_read_again_is(file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    path = file("old")
    keys = KeyRing([], str(path), clock=clock)

    def refuse(self: Path, **options: str) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)  # root is refused by no mode
        file("new-key")
        path.chmod(0)
        clock.now = 1.0
        assert keys.accepts(bearer("old"))
    path.chmod(0o600)
    clock.now = 2.0
    assert keys.accepts(bearer("new-key"))
    assert not keys.accepts(bearer("old"))


def test_a_change_while_the_file_is_first_read_is_seen(
    file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    path = file("old")
    read = Path.read_text

    def read_and_change(self: Path, **options: str) -> str:
        text = read(self, **options)
        self.write_text("replaced")
        return text

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", read_and_change)
        keys = KeyRing([], str(path), clock=clock)
    clock.now = 1.0
    assert keys.accepts(bearer("replaced"))


def test_a_token_is_given_or_read() -> None:
    assert worker_token(RouterConfig()) == ""
    assert worker_token(WorkerConfig(worker_token="secret")) == "secret"


def test_a_token_file_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    config = WorkerConfig(worker_token_file=str(tmp_path / "token"))
    with ThreadPoolExecutor(8) as pool:
        (token,) = set(pool.map(lambda _: worker_token(config, make=True), range(8)))
    assert len(token) >= 40
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    assert worker_token(RouterConfig(worker_token_file=str(tmp_path / "token"))) == token


def test_a_token_file_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="worker_token_file /no/such/token cannot be made or read"):
        worker_token(WorkerConfig(worker_token_file="/no/such/token"), make=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        worker_token(RouterConfig(worker_token_file=str(tmp_path / "none")))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match=r"the token in worker_token_file .* must be printable"):
        worker_token(RouterConfig(worker_token_file=str(tmp_path / "empty")))


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("router", False),
    ],
)
def test_addresses_that_only_this_machine_reaches(host: str, local: bool) -> None:
    assert is_loopback(host) is local
