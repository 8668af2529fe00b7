"""The container files, read but not built: what the compose files promise, what may go into the router's image, and
the two scripts that run inside. docs/containers.md tells how to build and run the images."""

from __future__ import annotations

import dataclasses
import http.server
import importlib.util
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from octavo.config import RouterConfig, WorkerConfig
from octavo.tls import link_identity
from tests.certificates import make_certificates

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
SETTINGS = {"worker": WorkerConfig, "router": RouterConfig}
# What docker-compose 1.29 refuses, wherever it stands.
TOO_NEW = {"name", "develop", "start_interval", "required", "additional_contexts", "secrets", "attach"}


def load_script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def compose(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return loaded


def stages() -> dict[str, str]:
    """Text of each stage of the Dockerfile, by name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def keys(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield key
            yield from keys(value)
    elif isinstance(node, list):
        for item in node:
            yield from keys(item)


def variables(service: dict[str, Any]) -> set[str]:
    """Names of Octavo's environment variables that a service is given."""
    names = {entry.partition("=")[0] for entry in service["environment"]}
    return {name for name in names if name.startswith("OCTAVO_")}


def known_variables(service: str) -> set[str]:
    return {f"OCTAVO_{field.name.upper()}" for field in dataclasses.fields(SETTINGS[service])}


class TestComposeFiles:
    @pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml"])
    def test_has_nothing_that_docker_compose_1_29_refuses(self, name: str) -> None:
        assert TOO_NEW.isdisjoint(keys(compose(name)))

    def test_builds_a_target_of_the_dockerfile_for_each_service(self) -> None:
        services = compose("docker-compose.yml")["services"]
        assert {name: service["build"]["target"] for name, service in services.items()} == {
            "worker": "worker",
            "router": "router",
        }
        assert {"worker", "router"} <= stages().keys()

    @pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml"])
    def test_build_arguments_are_declared_by_the_dockerfile(self, name: str) -> None:
        declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, flags=re.MULTILINE))
        for service in compose(name)["services"].values():
            assert set(service["build"]["args"]) <= declared

    @pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml"])
    def test_environment_variables_are_settings_of_the_program(self, name: str) -> None:
        for service, content in compose(name)["services"].items():
            assert variables(content) <= known_variables(service)

    def test_router_waits_for_a_healthy_worker(self) -> None:
        router = compose("docker-compose.yml")["services"]["router"]
        assert router["depends_on"] == {"worker": {"condition": "service_healthy"}}

    def test_only_the_router_is_published(self) -> None:
        services = compose("docker-compose.yml")["services"]
        assert "ports" not in services["worker"]
        assert [port.rpartition(":")[2] for port in services["router"]["ports"]] == ["8000", "50051"]

    def test_only_router_and_worker_are_on_the_backend_network(self) -> None:
        services = compose("docker-compose.yml")["services"]
        assert services["worker"]["networks"] == ["backend"]
        assert services["router"]["networks"] == ["frontend", "backend"]

    def test_router_and_worker_share_a_token(self) -> None:
        services = compose("docker-compose.yml")["services"]
        for service in services.values():
            assert "OCTAVO_WORKER_TOKEN_FILE=/var/lib/octavo/worker.token" in service["environment"]
        assert "link:/var/lib/octavo" in services["worker"]["volumes"]
        assert services["router"]["volumes"] == ["link:/var/lib/octavo:ro"]
        assert "/var/lib/octavo" in stages()["base"]

    def test_a_stop_takes_longer_than_the_routers_grace_period(self) -> None:
        for service in compose("docker-compose.yml")["services"].values():
            seconds = float(service["stop_grace_period"].removesuffix("s"))
            assert seconds > RouterConfig().grace_period_s

    def test_services_run_without_privileges(self) -> None:
        for service in compose("docker-compose.yml")["services"].values():
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]

    def test_gpu_override_asks_for_cuda_and_keeps_another_image(self) -> None:
        cpu = compose("docker-compose.yml")["services"]["worker"]
        gpu = compose("docker-compose.gpu.yml")["services"]["worker"]
        assert gpu["build"]["args"] == {"TORCH_BUILD": "cuda"}
        assert "OCTAVO_DEVICE=cuda" in gpu["environment"]
        assert gpu["image"] == cpu["image"] + "-cuda"


class TestDockerfile:
    def test_router_image_installs_only_the_router_and_the_client(self) -> None:
        assert "install.py dependencies clients/python router\n" in stages()["router"]
        assert "./clients/python ./router\n" in stages()["router-wheels"]
        for name in ("router", "router-wheels"):
            assert re.search(r"\b(kernels|worker-wheels|install\.py torch)\b", stages()[name]) is None

    def test_router_image_fails_to_build_with_torch_in_it(self) -> None:
        assert (
            "sys.exit('torch is in the router image' if importlib.util.find_spec('torch') else 0)" in stages()["router"]
        )

    def test_worker_image_takes_a_cpu_build_of_torch_unless_told_otherwise(self) -> None:
        assert "\nARG TORCH_BUILD=cpu\n" in stages()["worker"]

    def test_compiler_stays_in_the_build_stage(self) -> None:
        assert [name for name, text in stages().items() if "g++" in text] == ["worker-wheels"]
        assert [name for name, text in stages().items() if "gcc" in text] == ["worker"]

    @pytest.mark.parametrize(("build", "expected"), [("cpu", []), ("cuda", ["update", "install"])])
    def test_a_gpu_s_image_alone_has_a_compiler_and_checks_that_it_finds_headers(
        self, build: str, expected: list[str], tmp_path: Path
    ) -> None:
        [step] = re.findall(r"^RUN (if .+?^    fi)$", stages()["worker"], flags=re.MULTILINE | re.DOTALL)
        for name, does in {
            "apt-get": f'echo "$1" >> {tmp_path}/asked',
            "rm": "",
            "gcc": "cat > /dev/null; exit 3",
        }.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o755)
        environment = os.environ | {"TORCH_BUILD": build, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(["sh", "-c", step], env=environment, check=False)
        assert done.returncode == (3 if expected else 0)
        asked = tmp_path / "asked"
        assert (asked.read_text().split() if asked.exists() else []) == expected

    @pytest.mark.parametrize("name", ["router", "worker"])
    def test_image_runs_unprivileged_with_its_program_as_the_first_process(self, name: str) -> None:
        lines = stages()[name].splitlines()
        assert lines.index("USER octavo") < lines.index(f'ENTRYPOINT ["octavo-{name}"]')
        assert any(f'CMD ["python", "/opt/octavo/healthcheck.py", "{name}"]' in line for line in lines)

    @pytest.mark.parametrize("name", ["router", "worker"])
    def test_environment_variables_are_settings_of_the_program(self, name: str) -> None:
        found = set(re.findall(r"\b(OCTAVO_\w+)=", stages()[name]))
        assert found
        assert found <= known_variables(name)

    def test_every_copied_path_exists_and_is_sent_to_the_builder(self) -> None:
        allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
        for sources in re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE):
            for source in sources.split():
                assert (ROOT / source).exists()
                assert any(Path(source).match(pattern) or Path(pattern) in Path(source).parents for pattern in allowed)


class TestInstallScript:
    @pytest.fixture
    def install(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.setitem(sys.modules, "setup", load_script("scripts/setup.py"))
        return load_script("docker/install.py")

    def test_dependencies_leave_out_our_own_and_name_each_once(self, install: ModuleType, tmp_path: Path) -> None:
        for name, listed in {"a": '"numpy>=2", "octavo", "grpcio"', "b": '"octavo-kernels>=1", "grpcio"'}.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "pyproject.toml").write_text(f"[project]\ndependencies = [{listed}]\n")
        assert install.dependencies([tmp_path / "a", tmp_path / "b"]) == ["grpcio", "numpy>=2"]

    def test_router_depends_on_no_torch(self, install: ModuleType) -> None:
        found = install.dependencies([ROOT / "clients" / "python", ROOT / "router"])
        assert "jinja2" in {re.split(r"[^\w-]", requirement)[0].lower() for requirement in found}
        assert not [requirement for requirement in found if re.match(r"torch|transformers|triton|nvidia", requirement)]

    @pytest.mark.parametrize("arguments", [[], ["dependencies"], ["torch", "too", "many"], ["unknown"]])
    def test_wrong_arguments_exit_2(
        self, install: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert install.main(arguments) == 2
        assert "install.py dependencies FOLDER" in capsys.readouterr().err


@contextmanager
def http_server(status: int, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server that answers every GET with one status. Gives its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"no worker" if status >= 400 else b"{}")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextmanager
def grpc_server(
    status: int, credentials: grpc.ServerCredentials | None = None, *, address: str = "127.0.0.1:0"
) -> Iterator[int]:
    """A server with grpc.health.v1 alone. Gives its port."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    yield port
    server.stop(None).wait()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class TestHealthcheckScript:
    @pytest.fixture
    def healthcheck(self) -> ModuleType:
        return load_script("docker/healthcheck.py")

    @pytest.mark.parametrize(
        ("listen", "target"),
        [
            ("0.0.0.0:50061", "127.0.0.1:50061"),
            ("[::]:7000", "127.0.0.1:7000"),
            (":7000", "127.0.0.1:7000"),
            ("10.0.0.3:7000", "10.0.0.3:7000"),
            ("unix:/run/octavo/worker.sock", "unix:/run/octavo/worker.sock"),
        ],
    )
    def test_worker_target_is_the_listening_address_from_inside(
        self, healthcheck: ModuleType, listen: str, target: str
    ) -> None:
        assert healthcheck.worker_target({"OCTAVO_LISTEN": listen}) == target

    def test_addresses_without_variables_are_the_programs_defaults(self, healthcheck: ModuleType) -> None:
        assert healthcheck.worker_target({}) == WorkerConfig().listen
        assert healthcheck.router_url({}) == f"http://127.0.0.1:{RouterConfig().port}/ready"

    def test_router_that_answers_200_is_healthy(self, healthcheck: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        with http_server(200) as port:
            monkeypatch.setenv("OCTAVO_PORT", str(port))
            assert healthcheck.main(["router"]) == 0

    def test_router_that_answers_503_is_not(
        self, healthcheck: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with http_server(503) as port:
            monkeypatch.setenv("OCTAVO_PORT", str(port))
            assert healthcheck.main(["router"]) == 1
        assert "answers 503: no worker" in capsys.readouterr().out

    @pytest.mark.parametrize("service", ["router", "worker"])
    def test_server_that_is_not_there_is_not(
        self,
        healthcheck: ModuleType,
        service: str,
        closed_port: int,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("OCTAVO_PORT", str(closed_port))
        monkeypatch.setenv("OCTAVO_LISTEN", f"0.0.0.0:{closed_port}")
        assert healthcheck.main([service]) == 1
        assert f"127.0.0.1:{closed_port}" in capsys.readouterr().out

    def test_worker_that_serves_is_healthy(self, healthcheck: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        with grpc_server(health_pb2.HealthCheckResponse.SERVING) as port:
            monkeypatch.setenv("OCTAVO_LISTEN", f"0.0.0.0:{port}")
            assert healthcheck.main(["worker"]) == 0

    def test_worker_that_loads_is_not(
        self, healthcheck: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with grpc_server(health_pb2.HealthCheckResponse.NOT_SERVING) as port:
            monkeypatch.setenv("OCTAVO_LISTEN", f"0.0.0.0:{port}")
            assert healthcheck.main(["worker"]) == 1
        assert "answers NOT_SERVING" in capsys.readouterr().out

    @pytest.mark.parametrize("mutual", [False, True])
    def test_router_over_tls(
        self, healthcheck: ModuleType, mutual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = make_certificates(tmp_path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.server_chain, files.server_key)
        if mutual:
            context.load_verify_locations(files.authority)
            context.verify_mode = ssl.CERT_REQUIRED
            monkeypatch.setenv("OCTAVO_SSL_CA_CERTS", str(files.authority))
        monkeypatch.setenv("OCTAVO_SSL_KEYFILE", str(files.server_key))
        monkeypatch.setenv("OCTAVO_SSL_CERTFILE", str(files.server_chain))
        with http_server(200, context) as port:
            monkeypatch.setenv("OCTAVO_PORT", str(port))
            assert healthcheck.main(["router"]) == 0

    def test_router_with_a_unix_socket_is_asked_there(
        self, healthcheck: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OCTAVO_GRPC_SOCKET", str(tmp_path / "router.sock"))
        with grpc_server(health_pb2.HealthCheckResponse.SERVING, address=f"unix:{tmp_path}/router.sock"):
            assert healthcheck.main(["router"]) == 0
        assert healthcheck.main(["router"]) == 1

    def test_worker_over_tls_whose_certificate_names_another_host(
        self, healthcheck: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = make_certificates(tmp_path, server_names=("worker",))
        monkeypatch.setenv("OCTAVO_WORKER_SSL_KEYFILE", str(files.server_key))
        monkeypatch.setenv("OCTAVO_WORKER_SSL_CERTFILE", str(files.server_chain))
        monkeypatch.setenv("OCTAVO_WORKER_SSL_CA_CERTS", str(files.authority))
        identity = link_identity(WorkerConfig.from_values({}))
        assert identity is not None
        with grpc_server(health_pb2.HealthCheckResponse.SERVING, identity.server_credentials()) as port:
            monkeypatch.setenv("OCTAVO_LISTEN", f"0.0.0.0:{port}")
            assert healthcheck.main(["worker"]) == 0

    def test_wrong_arguments_exit_2(self, healthcheck: ModuleType) -> None:
        assert healthcheck.main(["client"]) == 2
