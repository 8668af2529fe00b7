from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from octavo.worker.v1 import worker_pb2 as pb
from octavo.worker.v1 import worker_pb2_grpc as pb_grpc
from octavo_kernels import InvalidArgumentError
from octavo_worker.main import main
from tests.worker.checkpoints import letter_tokenizer, tiny_config, tokenizer_content, write_checkpoint

COMMAND = [sys.executable, "-m", "octavo_worker"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "tiny", tiny_config())
    (folder / "tokenizer.json").write_bytes(letter_tokenizer().tokenizer_json)
    return folder


def refused(*arguments: str) -> str:
    """The one line on stderr of a program that must exit with 2."""
    done = subprocess.run([*COMMAND, *arguments, "--log-level=warning"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal_comes(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "w.sock"
    flags = [f"--model={model}", f"--listen=unix:{path}", "--num-device-blocks=9", "--worker-name=w3", "--block-size=8"]
    with subprocess.Popen([*COMMAND, *flags, "--swap-space=0.001"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if " ready on " in line)
        assert f"w3 ready on unix:{path}: model tiny, float32, kernels " in line
        assert "KV pool 9 blocks x 8 tokens" in line
        with grpc.insecure_channel(f"unix:{path}") as channel:
            description = pb_grpc.WorkerServiceStub(channel).Describe(pb.DescribeRequest(), timeout=20)
        process.send_signal(number)
        assert process.wait(20) == 0
    assert not path.exists()
    assert description.kv_memory.bytes_per_block == 2 * 2 * 2 * 8 * 8 * 4
    assert description.kv_memory.host_block_count == (1 << 30) // 1000 // 2048
    assert {*description.capabilities} == {
        pb.CAPABILITY_LOGIT_PROCESSORS,
        pb.CAPABILITY_GRAMMARS,
        pb.CAPABILITY_PROMPT_LOGPROBS,
        pb.CAPABILITY_BEAMS,
        pb.CAPABILITY_SWAP,
    }
    assert description.prefill_tokens_per_s > 0
    assert description.swap_bytes_per_s > 0
    assert (description.model.architecture, description.model.vocab_size) == ("LlamaForCausalLM", 96)
    assert description.model.max_model_len == 128
    assert description.incarnation != 0
    assert (description.max_plans_in_flight, description.lease_ms) == (2, 10_000)
    assert description.max_batched_token_count == 512


def test_tokenizer_that_grammars_cannot_work_with(model: Path, tmp_path: Path) -> None:
    """It is told once, and all but grammars is served."""
    (model / "tokenizer.json").write_text(json.dumps(tokenizer_content(96)))
    path = tmp_path / "w.sock"
    flags = [f"--model={model}", f"--listen=unix:{path}", "--num-device-blocks=9", "--block-size=8"]
    with subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = [next(iter(process.stderr))]
        while " ready on " not in lines[-1]:
            lines.append(next(iter(process.stderr)))
        with grpc.insecure_channel(f"unix:{path}") as channel:
            description = pb_grpc.WorkerServiceStub(channel).Describe(pb.DescribeRequest(), timeout=20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    warnings = [line for line in lines if "WARNING" in line and "grammars" in line]
    assert len(warnings) == 1
    assert "grammars are not offered: llguidance does not read the tokenizer" in warnings[0]
    assert pb.CAPABILITY_LOGIT_PROCESSORS in description.capabilities
    assert pb.CAPABILITY_GRAMMARS not in description.capabilities


def test_model_that_is_not_there() -> None:
    assert "model '/no/such/model' was not found" in refused("--model=/no/such/model", "--listen=127.0.0.1:0")


def test_port_in_use_fails_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert refused("--model=/no/such/model", f"--listen={listen}").endswith(
            f"cannot listen on {listen}: the address is in use or is not this machine's"
        )


def test_pool_that_does_not_fit(model: Path) -> None:
    line = refused(f"--model={model}", "--listen=127.0.0.1:0", "--num-device-blocks=1000000000")
    assert "num_device_blocks is 1000000000" in line


def test_attention_of_ones_own(model: Path, tmp_path: Path) -> None:
    listen = "--listen=127.0.0.1:0"
    line = refused(f"--model={model}", listen, "--attention-backend=tests.worker.own_attention:Missing")
    assert line.startswith("octavo-worker: attention_backend 'tests.worker.own_attention:Missing': ")
    path, name = tmp_path / "w.sock", "tests.worker.own_attention:Plain"
    flags = [f"--model={model}", f"--listen=unix:{path}", "--num-device-blocks=9", f"--attention-backend={name}"]
    with subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = [next(iter(process.stderr))]
        while " ready on " not in lines[-1]:
            lines.append(next(iter(process.stderr)))
        with grpc.insecure_channel(f"unix:{path}") as channel:
            description = pb_grpc.WorkerServiceStub(channel).Describe(pb.DescribeRequest(), timeout=20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert any(f"attention is computed by {name}" in line for line in lines)
    assert description.backend.endswith(f", attention {name}")


def test_weights_that_do_not_fit_into_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octavo_worker.devices.CpuDevice.free_memory", lambda _: 10_000)
    assert main([f"--model={model}", "--listen=127.0.0.1:0"]) == 2
    assert "octavo-worker: model tiny needs 0.00 GiB for its " in capsys.readouterr().err.splitlines()[-1]


def test_kernels_that_cannot_compute_the_model(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise InvalidArgumentError("head_dim is 7")

    monkeypatch.setattr("octavo_worker.assembly.measure_prefill", refuse)
    assert main([f"--model={model}", "--listen=127.0.0.1:0"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "octavo-worker: model tiny cannot be computed with the kernels that were chosen: head_dim is 7;"
    )
    assert "--kernel-backend reference" in line


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        (
            "--kv-cache-dtype=fp8_e4m3",
            "kv_cache_dtype is fp8_e4m3, in which the cpu kernels keep no K and V; "
            "use --kv-cache-dtype int8, which takes as much memory",
        ),
        (
            "--quantization=fp8",
            "quantization is fp8, and the cpu kernels have no such layers; "
            "use --quantization int8, which takes about as much memory",
        ),
    ],
)
def test_8_bit_floats_that_the_kernels_do_not_know(
    model: Path, capsys: pytest.CaptureFixture[str], flag: str, line: str
) -> None:
    assert main([f"--model={model}", "--listen=127.0.0.1:0", "--device=cpu", "--kernel-backend=cpu", flag]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"octavo-worker: {line}"


def test_setting_out_of_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--block-size=12"]) == 2
    assert capsys.readouterr().err == "octavo-worker: block_size is 12; it must be 8, 16 or 32\n"


def test_kv_size(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-size", f"--model={model}", "--dtype=bfloat16", "--block-size=8", "--tokens=9"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "model": "tiny",
        "dtype": "bfloat16",
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "bytes_per_element": 2,
        "scale_bytes_per_head": 0,
        "block_size": 8,
        "bytes_per_token": 128,
        "bytes_per_block": 1024,
        "max_model_len": 128,
        "bytes_per_max_model_len": 16_384,
        "tokens": 9,
        "bytes": 2048,
    }


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_kv_size_of_8_bits(model: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    assert main(["kv-size", f"--model={model}", f"--kv-cache-dtype={dtype}", "--block-size=8"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["dtype"], answer["bytes_per_element"], answer["scale_bytes_per_head"]) == (dtype, 1, 4)
    assert (answer["bytes_per_token"], answer["bytes_per_block"]) == (2 * 2 * 2 * (8 + 4), 768)


def test_kv_size_of_a_dtype_that_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "tiny", tiny_config(torch_dtype="float64"))
    assert main(["kv-size", f"--model={folder}"]) == 2
    assert "the checkpoint's dtype is 'float64'; give --dtype" in capsys.readouterr().err
    assert main(["kv-size", f"--model={folder}", "--dtype=float16"]) == 0


def test_kv_size_needs_no_torch() -> None:
    code = "import sys; from octavo_worker.main import main; main(['kv-size']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["bytes_per_token"] == 23_040  # 2 x 30 layers x 3 KV heads x 64 x 2 bytes
