"""Starts the real gateway on a real GPU, and compares what it says with NVML and with the engines' own reports.

ROUSE_GATEWAY and ROUSE_STUB name the built programs. NVML must list a GPU: without one, every test fails. Only with
ENGINE_DEVICE=cpu do the tests run without: then a fake NVML stands in (fake_nvml.c), which takes gcc. That dry run is
for whoever changes these tests, and says nothing about GPUs.

ROUSE_GPU_RESULTS names a folder that gets the measured figures and all logs.

These tests run on another machine from a copy of this folder with the folder `harness` beside it.
"""

import collections
import contextlib
import ctypes
import hashlib
import http.client
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "harness"))

from harness import GatewayProcess, get_json, program, until

GIB, MIB = 1 << 30, 1 << 20
ENGINE = [sys.executable, str(HERE / "engine.py")]
DRY = os.environ.get("ENGINE_DEVICE") == "cpu"
# No test waits longer for anything, but for an engine that starts: the first import of torch reads gigabytes.
WITHIN = 60
STARTS_WITHIN = 100

Sample = collections.namedtuple("Sample", "begun ended used by_pid")


def gib(size):
    return f"{size / GIB:.2f} GiB"


class Nvml:
    """What the driver says, asked without the gateway."""

    def __init__(self, nvml):
        self.nvml = nvml
        self.count = nvml.nvmlDeviceGetCount()
        self.handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(self.count)]
        self.uuids = [text(nvml.nvmlDeviceGetUUID(handle)) for handle in self.handles]

    def memory(self, number=0):
        return self.nvml.nvmlDeviceGetMemoryInfo(self.handles[number], version=self.nvml.nvmlMemory_v2)

    def used(self):
        return self.memory().used

    def by_pid(self):
        """Bytes by pid on the first GPU (`None` where the driver does not say); `None` without a list."""
        try:
            found = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handles[0])
        except self.nvml.NVMLError:
            return None
        return {process.pid: process.usedGpuMemory for process in found}

    def describe(self):
        memory = self.memory()
        return {
            "driver": text(self.nvml.nvmlSystemGetDriverVersion()),
            "device": text(self.nvml.nvmlDeviceGetName(self.handles[0])),
            "kernel": platform.release(),
            "uuids": self.uuids,
            "total": memory.total,
            "reserved_by_driver": memory.reserved,
            "used_at_start": memory.used,
            "processes_at_start": self.by_pid(),
        }


def text(value):
    return value.decode() if isinstance(value, bytes) else value


class Sampler:
    """Reads the first GPU's memory again and again; the end of each reading and what it showed."""

    def __init__(self, nvml, every=0.005):
        self.nvml, self.every, self.samples, self.done = nvml, every, [], threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join(10)

    def run(self):
        while not self.done.wait(self.every):
            begun, used, by_pid = time.time(), self.nvml.used(), self.nvml.by_pid()
            self.samples.append(Sample(begun, time.time(), used, by_pid))

    def most(self):
        return max(sample.used for sample in self.samples)

    def last_before(self, moment):
        return max((sample for sample in self.samples if sample.ended <= moment), key=lambda sample: sample.ended)

    def first_after(self, moment, wanted):
        """The first sample after this moment that is as wanted, or `None`."""
        found = (sample for sample in self.samples if sample.begun >= moment and wanted(sample))
        return next(found, None)


class Model:
    """A configured model on engine.py, and its engines' reports."""

    def __init__(self, folder, name, seed, accelerator, weights, kv, awake):
        self.name, self.awake, self.asleep, self.weights = name, awake, GIB, weights * GIB
        self.report = folder / f"{name}.jsonl"
        command = [*ENGINE, "--host", "${HOST}", "--port", "${PORT}", "--name", name, "--seed", str(seed)]
        command += ["--weights", str(weights), "--kv", str(kv), "--report", str(self.report), "--enable-sleep-mode"]
        self.entry = {
            "name": name,
            "engine": {"kind": "vllm", "command": command, "startTimeout": f"{STARTS_WITHIN}s"},
            "accelerators": [accelerator],
            "memory": {"awake": str(awake), "asleep": str(self.asleep), "host": str(self.weights)},
            "idle": {"sleepAfter": "never", "stopAfter": "never", "level": 1},
        }
        # vLLM's sleep mode is recognised by its own command; this one is another program.
        self.entry["engine"]["sleepMode"] = "vllm"

    def events(self, *kinds):
        if not self.report.exists():
            return []
        lines = self.report.read_text().splitlines()
        return [event for event in map(json.loads, lines) if not kinds or event["event"] in kinds]

    def last(self, *kinds):
        events = self.events(*kinds)
        assert events, f"{self.name} reported no {' or '.join(kinds)}"
        return events[-1]

    def pid(self):
        return self.last("start")["pid"]

    def awake_intervals(self):
        """From when the engine begins to take its memory until it has given it back; the last may be open."""
        intervals, since = [], None
        for event in self.events("load", "waking", "sleep"):
            if event["event"] == "sleep":
                intervals.append((since, event["at"]))
                since = None
            else:
                since = since if since is not None and event["event"] == "waking" else event["at"]
        return [*intervals, (since, float("inf"))] if since is not None else intervals


class Gateway(GatewayProcess):
    """One gateway process with the models that take turns."""

    def __init__(self, folder, config):
        self.journal, self.access = folder / "journal", folder / "access.log"
        config = {**config, "logs": {"access": str(self.access)}}
        super().__init__(folder, config, ["--journal", str(self.journal)])

    def environment(self):
        inherited = {name: value for name, value in super().environment().items() if not name.startswith("ROUSE_")}
        return {**inherited, "ROUSE_LOG": os.environ.get("ROUSE_LOG", "debug")}

    def run(self, *arguments):
        """One of the gateway's own commands, asked of this gateway; what it printed."""
        environment = {**os.environ, "ROUSE_ADMIN": self.admin}
        environment.pop("ROUSE_CONFIG", None)
        command = [program("ROUSE_GATEWAY"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def ps(self):
        return json.loads(self.run("ps", "--json"))

    def accelerator(self, uuid):
        return next(one for one in self.ps()["accelerators"] if one["id"] == uuid)

    def engine(self, model):
        return next((one for one in self.ps()["engines"] if one["engine"] == f"{model.name}#0"), None)

    def state(self, model):
        return next(one["state"] for one in self.ps()["models"] if one["name"] == model.name)

    def explain(self, model):
        return super().explain(model.name)

    def order(self, model, order):
        """An operator's order, until it is carried out."""
        url = f"{self.admin}/admin/v1/models/{model.name}/{order}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10) as response:
            number = json.load(response)["operation"]

        def outcome():
            operation = get_json(f"{self.admin}/admin/v1/operations/{number}")
            return operation if operation["state"] != "running" else None

        operation = until(outcome, WITHIN, f"{order} of {model.name}")
        assert operation["state"] == "done", operation

    def put_to_sleep(self, *models, level=1):
        for model in models:
            if self.state(model) == "awake":
                self.order(model, f"sleep?level={level}")
            until(lambda: self.state(model) not in ("awake", "launching"), WITHIN, f"{model.name} sleeps")

    def ask(self, model, within=WITHIN, tokens=16):
        """One streamed answer, checked to be whole."""
        connection = http.client.HTTPConnection(self.api.removeprefix("http://"), timeout=within)
        body = {"model": model.name, "stream": True, "max_tokens": tokens,
                "messages": [{"role": "user", "content": "Say something."}]}
        begun, first, pieces, finish, ended = time.monotonic(), None, [], None, False
        asked_at = time.time()
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            request_id = response.headers.get("x-request-id")
            if response.status != 200:
                raise AssertionError(f"{response.status} {response.read()[:2000]!r}; explain: {self.explain(model)}")
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    ended = True
                    continue
                event = json.loads(data)
                assert "error" not in event, (event, self.explain(model))
                for choice in event["choices"]:
                    if choice["delta"].get("content"):
                        first = first or time.monotonic()
                        pieces.append(choice["delta"]["content"])
                    finish = choice["finish_reason"] or finish
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"{model.name}: {error!r}; explain: {self.explain(model)}") from error
        finally:
            connection.close()
        assert ended and finish == "length" and len(pieces) == tokens, (ended, finish, pieces)
        answer = "".join(pieces)
        return {
            "model": model.name,
            "digest": hashlib.sha256(answer.encode()).hexdigest()[:16],
            "answer": answer,
            "asked_at": asked_at,
            "first": first - begun,
            "whole": time.monotonic() - begun,
            "id": request_id,
        }

    def access_line(self, request_id):
        """What the gateway itself wrote of this request."""

        def found():
            lines = self.access.read_text().splitlines() if self.access.exists() else []
            return next((line for line in map(json.loads, lines) if line["id"] == request_id), None)

        return until(found, 5, f"the access log has {request_id}")

    def readings(self, uuid):
        """What the gateway's meter showed: (seconds of Unix time, used, by engine) of each reading."""
        found = []
        for line in self.journal.read_text().splitlines() if self.journal.exists() else []:
            with contextlib.suppress(ValueError):
                turn = json.loads(line)
                for event in turn.get("events", []):
                    if event["event"] == "meterRead" and event["accelerator"] == uuid:
                        found.append((turn["at"] / 1000, event["used"], event["by_engine"]))
        return found

    def cpu_seconds(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metric(self, name):
        return sum(self.metrics(name).values())


def output_of(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"


class World:
    """What the tests share: NVML, the models, one gateway, and the figures."""

    def __init__(self, folder, nvml):
        self.folder, self.nvml, self.uuid = folder, nvml, nvml.uuids[0]
        self.figures = {"machine": nvml.describe(), "dry_run": DRY}
        self.headroom = GIB
        memory = nvml.memory()
        self.capacity = memory.total - memory.reserved - self.headroom
        # Each takes 60 % of the GPU, so that only one fits awake. A CUDA context and cuBLAS take up to 2 GiB of that.
        awake = self.capacity * 60 // 100 // GIB
        weights = 4
        assert awake > weights + 4, f"a GPU of {gib(memory.total)} is too small for these tests"
        make = lambda name, seed: Model(
            folder, name, seed, self.uuid, weights, awake - weights - 2, awake * GIB
        )
        self.alpha, self.beta = make("alpha", 1), make("beta", 2)
        self.models = [self.alpha, self.beta]
        self.digests = {}
        self.started = None

    @property
    def gateway(self):
        """The gateway; a new one if a test has ended the last one."""
        if self.started is None or self.started.process.poll() is not None:
            config = {
                "accelerators": "auto",
                "headroom": str(self.headroom),
                "host": {"sleepMemory": "16Gi"},
                "queue": {"maxWait": "100s"},
                "models": [model.entry for model in self.models],
            }
            self.started = Gateway(self.folder, config)
            self.started.wait_ready()
        return self.started

    def ask(self, model, within=STARTS_WITHIN, **options):
        """A request, whose answer must be the model's first one again."""
        answer = self.gateway.ask(model, within, **options)
        first = self.digests.setdefault(model.name, answer)
        assert answer["digest"] == first["digest"], (
            f"{model.name} answers {answer['answer']!r}, and at first {first['answer']!r}: its weights have changed"
        )
        return answer

    def note(self, name, value):
        self.figures[name] = value

    def diagnostics(self):
        parts = [("nvidia-smi", output_of("nvidia-smi") if not DRY else "a dry run")]
        parts += [("NVML", f"used {gib(self.nvml.used())}, by pid {self.nvml.by_pid()}")]
        if self.started is not None:
            try:
                parts += [("ps", self.started.run("ps"))]
                parts += [(f"explain {model.name}", self.started.run("explain", model.name)) for model in self.models]
            except Exception as error:
                parts += [("ps", f"failed: {error!r}")]
            parts += [("gateway.log", self.started.tail())]
            # Of the rest, the last words are enough.
            readings = self.started.readings(self.uuid)[-10:]
            parts += [("the gateway's last readings", "\n".join(map(str, readings)))]
        for model in self.models:
            report = "\n".join(map(json.dumps, model.events()[-8:]))
            parts += [(f"report of {model.name}", report)]
        for log in sorted((self.folder / "state" / "logs").glob("*")):
            parts += [(f"output of {log.name}", log.read_text(errors="replace")[-2000:])]
        return "\n".join(f"---- {name}\n{body}" for name, body in parts)

    def close(self):
        code = self.started.stop() if self.started is not None else 0
        pids = {event["pid"] for model in self.models for event in model.events("start")}
        left = [pid for pid in pids if is_engine(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.keep_results()
        assert code == 0, f"a gateway told to stop ends its engines and exits 0, not {code}\n{self.started.tail()}"
        assert not left, f"engines {left} outlived their gateway"

    def keep_results(self):
        results = os.environ.get("ROUSE_GPU_RESULTS")
        if not results:
            return
        folder = pathlib.Path(results)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "figures.json").write_text(json.dumps(self.figures, indent=1))
        for path in [*self.folder.glob("*.log"), *self.folder.glob("*.jsonl"), self.folder / "journal"]:
            if path.exists():
                shutil.copy(path, folder)
        for path in (self.folder / "state" / "logs").glob("*"):
            shutil.copy(path, folder / f"engine-{path.name.replace('#', '-')}")


def is_engine(pid):
    try:
        return b"engine.py" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def fake_nvml(folder):
    """Builds the fake NVML and makes it the one of this process and of all that it starts."""
    library, books = folder / "libnvidia-ml.so.1", folder / "books"
    books.mkdir()
    build = ["gcc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libnvidia-ml.so.1", str(HERE / "fake_nvml.c")]
    subprocess.run([*build, "-o", str(library)], check=True)
    os.environ.update(LD_LIBRARY_PATH=str(folder), FAKE_NVML_DIR=str(books))
    # Loaded once by its path, it is found by its name afterwards.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory):
    if DRY:
        fake_nvml(tmp_path_factory.mktemp("nvml"))
    needs = "these tests need an NVIDIA GPU, its driver with NVML, and the Python packages torch and nvidia-ml-py"
    try:
        import pynvml

        pynvml.nvmlInit()
        found = Nvml(pynvml)
    except Exception as error:
        pytest.exit(f"{needs}: {error!r}", returncode=1)
    if not found.handles:
        pytest.exit(f"{needs}: NVML lists no GPU", returncode=1)
    with contextlib.suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetMigMode(found.handles[0])[0]:
            pytest.exit("these tests need a whole GPU, and this one is cut into parts (MIG)", returncode=1)
    return found


@pytest.fixture(scope="session")
def world(nvml, tmp_path_factory, request):
    shared = World(tmp_path_factory.mktemp("gpu"), nvml)
    request.config.rouse_world = shared
    yield shared
    shared.close()


@pytest.fixture
def foreign(nvml):
    """Starts programs that hold GPU memory and are no engines."""
    started = []

    def start(size):
        holder = subprocess.Popen([*ENGINE, "--hold", str(size)], stdout=subprocess.PIPE, text=True)
        started.append(holder)
        # A driver that hangs ends this test, not the whole run.
        impatience = threading.Timer(30, holder.kill)
        impatience.start()
        line = holder.stdout.readline()
        impatience.cancel()
        assert line == "held\n", f"the other program could not hold {size} GiB: {line!r}, exit {holder.poll()}"
        return holder

    yield start
    for holder in started:
        holder.kill()
        holder.wait()
        holder.stdout.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    world = getattr(item.config, "rouse_world", None)
    if report.failed and world is not None and call.when == "call":
        try:
            report.sections.append(("what the machine shows", world.diagnostics()))
        except Exception as error:
            report.sections.append(("what the machine shows", f"cannot be collected: {error!r}"))
    if world is not None and call.when == "call":
        world.figures.setdefault("tests", {})[item.name] = [report.outcome, round(call.duration, 2)]
        with contextlib.suppress(OSError):
            world.keep_results()


def pytest_terminal_summary(terminalreporter, config):
    world = getattr(config, "rouse_world", None)
    if world is not None:
        terminalreporter.section("figures")
        for name, value in world.figures.items():
            terminalreporter.write_line(f"{name}: {json.dumps(rounded(value))}")


def rounded(value):
    """Figures for people: four digits behind the point."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, (list, tuple)) else value
