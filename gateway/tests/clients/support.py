"""The gateway in a process of its own, and the simulated engine under it, seen from both sides.

The engine that the gateway launched is also spoken to directly: the same request to both must give the same answer. Its
ids and timestamps follow from the request's body, so what differs is what the gateway changed.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request

import yaml

READY_WITHIN = 30
STOPPED_WITHIN = 45

# The engine's name for the model is not the clients': each request's body, also a form, is rewritten on its way.
MODEL, SERVED = "assistant", "acme/tiny-1"


def until(condition, within, what):
    """Polls from outside, where no event can be had; the result of `condition`, once true."""
    deadline = time.monotonic() + within
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.02)


def get_json(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def together(cases):
    """Runs all at once; name to result. The first failure is raised, with its name, after all have ended."""
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        running = {name: pool.submit(case) for name, case in cases.items()}
        concurrent.futures.wait(running.values())
    failed = {name: one.exception() for name, one in running.items() if one.exception()}
    if failed:
        raise AssertionError({name: repr(error) for name, error in failed.items()}) from next(iter(failed.values()))
    return {name: one.result() for name, one in running.items()}


def simulated(name, *flags, served=None, shell=None):
    """A model on the simulated engine, as it stands in the configuration. `shell` comes before the engine's command."""
    command = [binary(), "demo-engine", "--host", "${HOST}", "--port", "${PORT}", "--model", served or name]
    command += ["--enable-sleep-mode", "--fixed-ids", "--profile-time", "0", "--ttft", "2ms", "--itl", "2ms", *flags]
    if shell:
        command = ["sh", "-c", f'{shell}; exec "$@"', "engine", *command]
    engine = {"kind": "vllm", "command": command, "env": {"VLLM_SERVER_DEV_MODE": "1"}}
    if served:
        engine["servedName"] = served
    return {"name": name, "engine": engine, "memory": {"awake": "1Gi", "asleep": "64Mi", "host": "16Mi"}}


@contextlib.contextmanager
def running(folder, *models, **settings):
    """A gateway that serves when it is given, and is told to stop whatever happens meanwhile."""
    gateway = Gateway(folder, *models, **settings)
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        code = gateway.stop()
        print(gateway.tail())
    assert code == 0, "a gateway told to stop ends its streams and its engines, and exits 0"


def binary():
    path = os.environ.get("ROUSE_GATEWAY")
    assert path, "ROUSE_GATEWAY must name the built rouse-gateway; `make test-clients` sets it"
    return path


class Gateway:
    def __init__(self, folder, *models, **settings):
        self.log = folder / "gateway.log"
        self.state = folder / "state"
        config = {
            "state": str(self.state),
            "accelerators": [{"id": "gpu-0", "memory": "16Gi"}],
            "headroom": 0,
            "models": list(models),
            **settings,
        }
        path = folder / "rouse.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [binary(), "--config", str(path), "--api", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)

    def wait_ready(self):
        # It says where it listens, the API first.
        lines = [self.process.stdout.readline() for _ in range(2)]
        assert all(lines), f"the gateway said no address\n{self.tail()}"
        self.api, self.admin = (re.search(r"http://[0-9.:]+", line)[0] for line in lines)
        until(self.is_ready, READY_WITHIN, f"/readyz\n{self.tail()}")

    def is_ready(self):
        assert self.process.poll() is None, f"the gateway exited with {self.process.returncode}\n{self.tail()}"
        try:
            return urllib.request.urlopen(self.api + "/readyz", timeout=2).status == 200
        except urllib.error.HTTPError:
            return False

    def wake(self, model):
        request = urllib.request.Request(f"{self.admin}/admin/v1/models/{model}/wake", method="POST", data=b"")
        urllib.request.urlopen(request, timeout=10).close()
        self.until_state(model, "awake")

    def until_state(self, model, state):
        until(lambda: self.engines()[f"{model}#0"]["state"].lower() == state, 30, f"{model} is {state}")

    def engines(self):
        return {engine["engine"]: engine for engine in get_json(self.admin + "/admin/v1/fleet")["engines"]}

    def leases(self):
        return sum(engine["leases"] for engine in self.engines().values())

    def metrics(self, name):
        """The samples of one metric whose value is not 0; labels to value."""
        with urllib.request.urlopen(self.admin + "/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line.startswith((name + "{", name + " ")))
        return {labels: float(value) for labels, value in samples if float(value)}

    def engine(self, model):
        """The engine's own address, past the gateway."""
        def address():
            engines = json.loads((self.state / "engines.json").read_text())["engines"]
            return engines.get(f"{model}#0", {}).get("address")

        return Engine("http://" + until(address, 10, f"{model} has an address"))

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
        finally:
            self.process.stdout.close()

    def tail(self):
        return self.log.read_text(errors="replace")[-4000:]


class Engine:
    def __init__(self, url):
        self.url = url

    def counters(self):
        return get_json(self.url + "/sim/counters")

    def fault(self, **faults):
        """Sets faults, clears those that are None: `fault(fail_next=1)`."""
        body = json.dumps({name.replace("_", "-"): value for name, value in faults.items()}).encode()
        urllib.request.urlopen(urllib.request.Request(self.url + "/sim/faults", data=body), timeout=10).close()

    def busy(self):
        counters = self.counters()
        return counters["running"] + counters["waiting"]


class Side:
    """One way to the engine: where a client's base URL points, and the model's name there."""

    def __init__(self, name, url, model):
        self.name, self.url, self.model = name, url, model

    def __repr__(self):
        return self.name


class Node:
    """One node process that makes the npm client's calls; a line of JSON in, a line of JSON out, in any order."""

    def __init__(self, log):
        script = pathlib.Path(__file__).parent / "node.cjs"
        node = os.environ.get("ROUSE_NODE", "node")
        self.process = subprocess.Popen(
            [node, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        self.asked = 0
        self.answers = {}
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.reader = self.pool.submit(self.read)

    def read(self):
        for line in self.process.stdout:
            answer = json.loads(line)
            self.answers.pop(answer["id"]).set_result(answer)
        for left in list(self.answers.values()):
            left.set_exception(AssertionError("node ended"))

    def call(self, name, side, within=60, **options):
        """The result of one call in node.cjs; what it threw is raised."""
        self.asked += 1
        answer = self.answers[self.asked] = concurrent.futures.Future()
        ask = {"id": self.asked, "call": name, "url": side.url, "model": side.model, "options": options}
        self.process.stdin.write(json.dumps(ask) + "\n")
        self.process.stdin.flush()
        answer = answer.result(within)
        if "thrown" in answer:
            raise Thrown(**answer["thrown"])
        return answer["result"]

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.pool.shutdown()
        self.process.stdout.close()


class Thrown(Exception):
    """An error of the npm client."""

    def __init__(self, name, message, status=None, error=None):
        super().__init__(f"{name}: {message}")
        self.name, self.status, self.error = name, status, error
