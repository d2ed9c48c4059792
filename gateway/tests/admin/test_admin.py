"""The admin API of a running gateway, held to its own description.

schemathesis makes requests from the OpenAPI document (valid ones, invalid ones, sequences by its links) and checks
every answer against it: no 5xx, only described statuses, contents, headers and schemas. It orders models about as it
likes, which engines that are only pretended bear.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import urllib.request

import pytest

from harness import GatewayProcess, get_json, program, serving

HERE = pathlib.Path(__file__).parent
DOCUMENT = "/admin/v1/openapi.json"
TOKEN = "a-token-of-this-test"


class Gateway(GatewayProcess):
    """One gateway process. With `token` it has one configured, and one model; else it is the demonstration."""

    probe_timeout = 10

    def __init__(self, folder, token=None):
        self.token = token
        super().__init__(folder, configuration(token) if token else None)

    def models(self):
        return [model["id"] for model in get_json(self.api + "/v1/models")["data"]]


def configuration(token):
    """One pretended model on an accelerator without a meter."""
    command = [program("ROUSE_GATEWAY"), "demo-engine", "--host", "${HOST}", "--port", "${PORT}"]
    command += ["--model", "org/pretended", "--start-time", "200ms", "--enable-sleep-mode"]
    command += ["--gpu-memory-utilization", "${MEMORY_FRACTION}"]
    return {
        "headroom": 0,
        "accelerators": [{"id": "a", "memory": "2Gi"}],
        "admin": {"token": token, "metrics": "token"},
        "models": [
            {
                "name": "org/pretended",
                "aliases": ["alias"],
                "engine": {"kind": "vllm", "command": command, "env": {"VLLM_SERVER_DEV_MODE": "1"}},
                "memory": {"awake": "1Gi", "asleep": "64Mi", "host": "16Mi"},
            }
        ],
    }


@pytest.fixture(params=["demonstration", "token"])
def gateway(request, tmp_path):
    with serving(Gateway(tmp_path, TOKEN if request.param == "token" else None)) as one:
        yield one


def test_every_answer_is_as_the_document_says(gateway, tmp_path):
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "hooks",
        "PYTHONPATH": str(HERE),
        "ROUSE_MODELS": json.dumps(gateway.models()),
    }
    command = [str(pathlib.Path(sys.executable).with_name("schemathesis")), "run", gateway.admin + DOCUMENT]
    # Answers without an end: the events are looked at below.
    command += ["--exclude-path", "/admin/v1/events", "--exclude-path", "/admin/v1/live"]
    # Engines answer it, each in its own way.
    command += ["--exclude-path", "/admin/v1/chat"]
    command += ["--checks", "all", "--max-examples", "40", "--seed", "2026", "--request-timeout", "10"]
    command += ["--continue-on-failure", "--generation-database", "none", "--no-color"]
    if gateway.token:
        command += ["--header", f"Authorization: Bearer {gateway.token}"]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    print(run.stdout[-20000:], run.stderr[-4000:])
    assert run.returncode == 0
    assert gateway.process.poll() is None


def test_events_come_as_they_happen(gateway):
    headers = {"authorization": f"Bearer {gateway.token}"} if gateway.token else {}
    events = urllib.request.urlopen(urllib.request.Request(gateway.admin + "/admin/v1/events", headers=headers), timeout=20)
    with contextlib.closing(events):
        assert events.headers["content-type"] == "text/event-stream"
        name = gateway.models()[0]
        wake = urllib.request.Request(f"{gateway.admin}/admin/v1/models/{name}/wake", method="POST", headers=headers)
        with urllib.request.urlopen(wake, timeout=10) as answer:
            assert answer.status == 202
        line = next(line for line in events if line.startswith(b"data: "))
        json.loads(line.removeprefix(b"data: "))
