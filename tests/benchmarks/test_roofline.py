"""The counted floor of a step against sums written down by hand, and the command around it."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("roofline")


@pytest.fixture
def floor(roofline):
    """Llama 3 8B in bf16 at 1 TB/s and 100 TFLOP/s."""
    return roofline.Floor(roofline.model_config("llama-3-8b"), "bfloat16", 2, roofline.Rates(1e12, 1e14))


def test_weights_and_kv_of_llama_3_8b(floor):
    assert floor.num_body_weights == 6_979_321_856  # 32 * (41,943,040 + 176,160,768)
    assert floor.num_weights == 7_504_658_432  # and 128,256 * 4,096
    assert floor.kv_bytes_per_token == 131_072
    assert replace(floor, kv_dtype="int8").kv_bytes_per_token == 2 * 32 * 8 * (128 + 4)


def test_a_decode_step(floor):
    work = floor.decode(64, 8000)
    assert work.weight_bytes == 15_009_316_864
    assert work.kv_bytes == 64 * 8000 * 131_072
    assert work.linear_flops == 64 * 15_009_316_864
    assert work.attention_flops == 64 * 4_194_304_000
    assert floor.step_s(64, 8000) == pytest.approx((15_009_316_864 + 67_108_864_000) / 1e12)
    assert floor.step_s(256, 1) == pytest.approx(256 * (15_009_316_864 + 524_288) / 1e14)  # arithmetic decides


def test_a_window_bounds_what_a_layer_sees(floor):
    windows = (100,) * 16 + (None,) * 16
    work = replace(floor, config=replace(floor.config, sliding_windows=windows)).decode(1, 1000)
    assert work.kv_bytes == 131_072 / 32 * 16 * (100 + 1000)
    assert work.attention_flops == 4 * 32 * 128 * 16 * (100 + 1000)


def test_a_prompt(floor):
    work = floor.prefill(4)
    assert work.linear_flops == 2 * (4 * 6_979_321_856 + 525_336_576)
    assert work.attention_flops == 4 * 32 * 32 * 128 * (1 + 2 + 3 + 4)
    assert work.kv_bytes == 2 * 4 * 131_072
    windowed = replace(floor, config=replace(floor.config, sliding_windows=(2,) * 32)).prefill(4)
    assert windowed.attention_flops == 4 * 32 * 32 * 128 * (1 + 2 + 2 + 2)


def test_the_command_s_tables(roofline, capsys):
    command = ["llama-3-8b", "--gb-per-s", "4300", "--tflops", "790", "--memory-gb", "141"]
    assert roofline.main(command) == 0
    shown = capsys.readouterr().out
    assert "Computed, not measured: llama-3-8b, 7,504,658,432 weights" in shown
    assert "4,300 GB/s and 790 TFLOP/s (as given)" in shown
    assert "| 64 | 8,000 | 3.49 | 15.61 | 1.56 | 19.10 | KV | 3,351 |" in shown
    assert "| 256 | 8,000 | | | | | does not fit: 284 GB | |" in shown
    page = (FOLDER.parent / "docs" / "roofline.md").read_text()
    rows = [line for line in shown.splitlines() if line.startswith("| ")]
    assert all(line in page for line in rows), "docs/roofline.md has another table"


def test_a_config_file_and_a_data_sheet(roofline, capsys, tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    command = [str(path), "--device", "h100", "--weights", "int4", "--batches", "1", "--contexts", "10"]
    assert roofline.main(command) == 0
    assert "(data sheet, dense, without sparsity)" in capsys.readouterr().out
    assert roofline.main([str(tmp_path / "none.json"), "--device", "h100"]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "give --device"),
        (["--device", "h200", "--tflops", "0"], "--tflops is 0"),
        (["--batches", "0"], "--batches"),
    ],
)
def test_wrong_arguments(roofline, capsys, wrong, message):
    with pytest.raises(SystemExit):
        roofline.main(["llama-3-8b", *wrong])
    assert message in capsys.readouterr().err
