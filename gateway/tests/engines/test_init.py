"""The file that `init` writes for llama.cpp and a GGUF file serves the first request."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import openai

from harness import program


def init(folder, models, output):
    """Runs `init` for a user whose home is this folder, with the Python of this environment first in the path."""
    environment = {
        **os.environ,
        "HOME": str(folder),
        "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
    }
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "VIRTUAL_ENV", "CONDA_PREFIX"):
        environment.pop(name, None)
    return subprocess.run(
        [program("ROUSE_GATEWAY"), "init", "--json", "--output", str(output), "--models", str(models)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_written_file_serves_the_first_request(gateway, tmp_path, tiny_llama):
    models = tmp_path / "gguf"
    models.mkdir()
    # No process of an engine may be taken for one of another test: the path is in its command.
    shutil.copy(tiny_llama, models / "Rouse Test Init.gguf")
    output = tmp_path / "written.yaml"
    result = init(tmp_path, models, output)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    print(output.read_text())
    (model,) = [model for model in report["models"] if model["name"] == "rouse-test-init"]
    assert model["engine"] == "llama-cpp"

    rouse = gateway(output)
    api = openai.OpenAI(base_url=rouse.api + "/v1", api_key="any", max_retries=0, timeout=150)
    answer = api.chat.completions.create(
        model=model["name"], messages=[{"role": "user", "content": "Say something."}], max_tokens=8
    )
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


def test_an_existing_file_is_left_alone(tmp_path, tiny_llama):
    output = tmp_path / "written.yaml"
    output.write_text("models: []\n")
    result = init(tmp_path, pathlib.Path(tiny_llama).parent, output)
    assert result.returncode == 1
    assert "--force" in result.stderr
    assert output.read_text() == "models: []\n"
