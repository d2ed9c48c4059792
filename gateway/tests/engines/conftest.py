"""Starts the real gateway, and sees from outside what it does to processes.

What a test asserts about engines comes from /proc and from the clients' answers, not from the gateway's word alone.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import yaml

import make_gguf

READY_WITHIN = 30
STOPPED_WITHIN = 45


def until(condition, within, what):
    """Polls from outside, where no event can be had; the result of `condition`, once true."""
    deadline = time.monotonic() + within
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def watching(look, every=0.05):
    """Calls `look` again and again from a thread of its own while the body runs; its failure fails the test."""
    done = threading.Event()

    def watch():
        while not done.wait(every):
            look()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch)
        try:
            yield
        finally:
            done.set()
        watcher.result()


def together(work, *arguments):
    """Runs `work` on each argument at once and waits for all; the first failure is raised."""
    with concurrent.futures.ThreadPoolExecutor(len(arguments)) as pool:
        list(pool.map(work, arguments))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def processes_with(argument):
    """Pids whose command line holds exactly this argument; zombies have none."""
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if argument.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def processes_in(folder):
    """Pids whose working directory is this folder or below it."""
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if pathlib.Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                    found.add(int(entry.name))
    return found


class Gateway:
    """One gateway process. Without a `config` it runs its embedded demonstration."""

    def __init__(self, folder, config=None):
        binary = os.environ.get("ROUSE_GATEWAY")
        assert binary, "ROUSE_GATEWAY must name the built rouse-gateway; `make test-engines` sets it"
        self.log = folder / "gateway.log"
        self.api = f"http://127.0.0.1:{free_port()}"
        self.admin = f"http://127.0.0.1:{free_port()}"
        command = [binary] if config is not None else [binary, "demo"]
        command += ["--api", self.api.removeprefix("http://"), "--admin", self.admin.removeprefix("http://")]
        if config is not None:
            path = folder / "rouse.yaml"
            path.write_text(yaml.safe_dump({**config, "state": str(folder / "state")}))
            command += ["--config", str(path)]
        # The demonstration keeps its state here too: one that the same person has running is none of our business.
        environment = {**os.environ, "XDG_STATE_HOME": str(folder)}
        environment.pop("STATE_DIRECTORY", None)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_ready(self):
        def ready():
            assert self.process.poll() is None, f"the gateway exited with {self.process.returncode}\n{self.tail()}"
            return self.answers(self.api + "/readyz")

        until(ready, READY_WITHIN, "/readyz")

    def stop(self):
        """As an operator would; the return code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOPPED_WITHIN)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def models(self):
        """Name to state, as any client may read it."""
        return {model["id"]: model["state"] for model in get_json(self.api + "/v1/models")["data"]}

    def fleet(self):
        return get_json(self.admin + "/admin/v1/fleet")

    def explain(self, model):
        return get_json(f"{self.admin}/admin/v1/models/{model}/explain")

    def tail(self):
        return self.log.read_text(errors="replace")[-4000:]

    @staticmethod
    def answers(url):
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                return response.status == 200
        except OSError:
            return False


def get_json(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


@pytest.fixture
def gateway(tmp_path, llama_model):
    """Starts gateways, and afterwards stops them and shows that they left no engine behind.

    It asks for `llama_model` so that it ends first, and what is still there afterwards was left behind.
    """
    started = []

    def start(config=None):
        started.append(Gateway(tmp_path, config))
        started[-1].wait_ready()
        return started[-1]

    yield start
    for one in started:
        try:
            code = one.stop()
        finally:
            print(one.tail())
        assert code == 0, "a gateway told to stop ends its streams and its engines, and exits 0"
    assert_gone(processes_in(tmp_path))


def assert_gone(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not pids, f"processes {pids} outlived their gateway"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    make_gguf.write(str(path))
    return str(path)


class LlamaModel:
    """A configured model on llama.cpp's Python server, and its processes as the kernel sees them."""

    def __init__(self, name, gguf_path, **settings):
        self.name = name
        # By default that server lets a second request interrupt a running one.
        command = [sys.executable, "-m", "llama_cpp.server", "--model", gguf_path, "--model_alias", name]
        command += ["--host", "${HOST}", "--port", "${PORT}", "--interrupt_requests", "false", "--n_threads", "1"]
        self.entry = {
            "name": name,
            "engine": {"kind": "llama-cpp", "command": command, "startTimeout": "60s"},
            "accelerators": 1,
            "memory": {"awake": "700Mi"},
            "maxConcurrency": 1,
            **settings,
        }

    def processes(self):
        return processes_with(self.name)


@pytest.fixture
def llama_model(tiny_llama):
    models = []

    def make(name, **settings):
        models.append(LlamaModel(name, tiny_llama, **settings))
        return models[-1]

    yield make
    assert_gone(set().union(*(model.processes() for model in models)))
