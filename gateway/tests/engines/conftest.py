"""Starts the real gateway, and sees from outside what it does to processes.

What a test asserts about engines comes from /proc and from the clients' answers, not from the gateway's word alone.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import sys
import threading

import pytest

import make_gguf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))

from harness import GatewayProcess, get_json, serving


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


class Gateway(GatewayProcess):
    def models(self):
        """Name to state, as any client may read it."""
        return {model["id"]: model["state"] for model in get_json(self.api + "/v1/models")["data"]}


@pytest.fixture
def gateway(tmp_path, llama_model):
    """Starts gateways, and afterwards stops them and shows that they left no engine behind.

    It asks for `llama_model` so that it ends first, and what is still there afterwards was left behind.
    """
    with contextlib.ExitStack() as started:
        yield lambda config=None: started.enter_context(serving(Gateway(tmp_path, config)))
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
