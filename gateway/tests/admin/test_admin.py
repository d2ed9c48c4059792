"""The admin API of a running gateway, held to its own description.

schemathesis makes requests from the OpenAPI document (valid ones, invalid ones, sequences by its links) and checks
every answer against it: no 5xx, only described statuses, contents, headers and schemas. It orders models about as it
likes, which engines that are only pretended bear.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

HERE = pathlib.Path(__file__).parent
DOCUMENT = "/admin/v1/openapi.json"
TOKEN = "a-token-of-this-test"
READY_WITHIN = 30


class Gateway:
    """One gateway process. With `token` it has one configured, and one model; else it is the demonstration."""

    def __init__(self, folder, token=None):
        binary = os.environ.get("ROUSE_GATEWAY")
        assert binary, "ROUSE_GATEWAY must name the built rouse-gateway; `make test-admin` sets it"
        command = [binary] if token else [binary, "demo"]
        command += ["--api", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        self.token = token
        if token:
            path = folder / "rouse.yaml"
            path.write_text(configuration(binary, folder, token))
            command += ["--config", str(path)]
        environment = {**os.environ, "XDG_STATE_HOME": str(folder)}
        environment.pop("STATE_DIRECTORY", None)
        self.log = (folder / "gateway.log").open("ab")
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        # It says where it listens before anything else.
        self.api = self.process.stdout.readline().split()[-1].removesuffix("/v1")
        self.admin = self.process.stdout.readline().split()[-1]
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.wait_ready()

    def wait_ready(self):
        deadline = time.monotonic() + READY_WITHIN
        while self.get(self.api + "/readyz")[0] != 200:
            assert time.monotonic() < deadline and self.process.poll() is None, "the gateway is not ready"
            time.sleep(0.05)

    def models(self):
        return [model["id"] for model in json.loads(self.get(self.api + "/v1/models")[1])["data"]]

    def get(self, url, timeout=10):
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(45)
        finally:
            self.process.kill()
            self.log.close()


def configuration(binary, folder, token):
    """One pretended model on an accelerator without a meter."""
    quoted = json.dumps(binary)
    return f"""
state: {json.dumps(str(folder / "state"))}
headroom: 0
accelerators: [{{id: a, memory: 2Gi}}]
admin: {{token: {token}, metrics: token}}
models:
  - name: org/pretended
    aliases: [alias]
    engine:
      kind: vllm
      command: [{quoted}, demo-engine, --host, "${{HOST}}", --port, "${{PORT}}", --model, org/pretended, --start-time, 200ms,
        --enable-sleep-mode, --gpu-memory-utilization, "${{MEMORY_FRACTION}}"]
      env: {{VLLM_SERVER_DEV_MODE: "1"}}
    memory: {{awake: 1Gi, asleep: 64Mi, host: 16Mi}}
"""


@pytest.fixture(params=["demonstration", "token"])
def gateway(request, tmp_path):
    one = Gateway(tmp_path, TOKEN if request.param == "token" else None)
    try:
        yield one
    finally:
        code = one.stop()
        print((tmp_path / "gateway.log").read_text(errors="replace")[-4000:])
        assert code == 0, "a gateway told to stop ends its engines, and exits 0"


def test_every_answer_is_as_the_document_says(gateway, tmp_path):
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "hooks",
        "PYTHONPATH": str(HERE),
        "ROUSE_MODELS": json.dumps(gateway.models()),
    }
    command = [str(pathlib.Path(sys.executable).with_name("schemathesis")), "run", gateway.admin + DOCUMENT]
    # Its answer has no end: looked at below.
    command += ["--exclude-path", "/admin/v1/events"]
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
