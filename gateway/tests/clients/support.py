"""The gateway in a process of its own, and the simulated engine under it, seen from both sides.

The engine that the gateway launched is also spoken to directly: the same request to both must give the same answer. Its
ids and timestamps follow from the request's body, so what differs is what the gateway changed.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import urllib.request

from harness import GatewayProcess, get_json, program, serving, until

# The engine's name for the model is not the clients': each request's body, also a form, is rewritten on its way.
MODEL, SERVED = "assistant", "acme/tiny-1"


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
    command = [program("ROUSE_GATEWAY"), "demo-engine", "--host", "${HOST}", "--port", "${PORT}"]
    command += ["--model", served or name, "--enable-sleep-mode", "--fixed-ids", "--profile-time", "0", "--ttft", "2ms", "--itl", "2ms", *flags]
    if shell:
        command = ["sh", "-c", f'{shell}; exec "$@"', "engine", *command]
    engine = {"kind": "vllm", "command": command, "env": {"VLLM_SERVER_DEV_MODE": "1"}}
    if served:
        engine["servedName"] = served
    return {"name": name, "engine": engine, "memory": {"awake": "1Gi", "asleep": "64Mi", "host": "16Mi"}}


def running(folder, *models, **settings):
    """A gateway that serves when it is given, and is told to stop whatever happens meanwhile."""
    return serving(Gateway(folder, *models, **settings))


class Gateway(GatewayProcess):
    def __init__(self, folder, *models, **settings):
        config = {
            "accelerators": [{"id": "gpu-0", "memory": "16Gi"}],
            "headroom": 0,
            "models": list(models),
            **settings,
        }
        super().__init__(folder, config)

    def wake(self, model):
        request = urllib.request.Request(f"{self.admin}/admin/v1/models/{model}/wake", method="POST", data=b"")
        urllib.request.urlopen(request, timeout=10).close()
        self.until_state(model, "awake")

    def until_state(self, model, state):
        until(lambda: self.engines()[f"{model}#0"]["state"].lower() == state, 30, f"{model} is {state}")

    def engines(self):
        return {engine["engine"]: engine for engine in self.fleet()["engines"]}

    def leases(self):
        return sum(engine["leases"] for engine in self.engines().values())

    def engine(self, model):
        """The engine's own address, past the gateway."""
        def address():
            engines = json.loads((self.state_folder / "engines.json").read_text())["engines"]
            return engines.get(f"{model}#0", {}).get("address")

        return Engine("http://" + until(address, 10, f"{model} has an address"))


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
