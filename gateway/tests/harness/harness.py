"""What the Python tests share: the gateway as a process, and polling with a deadline.

Each suite is a folder beside this one, and its conftest.py puts this folder on `sys.path`. To run a suite on another
machine, copy both folders and keep them side by side. This module needs only the standard library.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

READY_WITHIN = 30
STOPPED_WITHIN = 45


def until(condition, within, what, every=0.02):
    """Polls from outside, where no event can be had; the result of `condition`, once true."""
    deadline = time.monotonic() + within
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(every)


def program(variable):
    """The path of the built program that this environment variable names."""
    path = os.environ.get(variable)
    assert path, f"{variable} must name the built program; the suite's target in the Makefile sets it"
    return os.path.abspath(path)


def get_json(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


class GatewayProcess:
    """One gateway process on ports that the kernel chooses.

    `config` has the settings, or is the path of a file with them. Without it the gateway runs its embedded
    demonstration.
    """

    # Seconds for one answer of /readyz.
    probe_timeout = 2

    def __init__(self, folder, config=None, arguments=()):
        self.folder, self.config = folder, folder / "rouse.yaml"
        self.state_folder, self.log = folder / "state", folder / "gateway.log"
        command = [program("ROUSE_GATEWAY")]
        if config is None:
            command += ["demo"]
        else:
            if isinstance(config, pathlib.Path):
                self.config = config
            else:
                # JSON is YAML.
                self.config.write_text(json.dumps({"state": str(self.state_folder), **config}, indent=1))
            command += ["--config", str(self.config)]
        command += ["--api", "127.0.0.1:0", "--admin", "127.0.0.1:0", *arguments]
        self.printed = []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=self.environment(), stdout=subprocess.PIPE, stderr=log,
                text=True, encoding="utf-8", errors="replace",
            )  # fmt: skip
        self.reader = threading.Thread(target=self.read_output, daemon=True)
        self.reader.start()

    def environment(self):
        """The gateway's environment. The demonstration, too, keeps its state in the test's folder."""
        environment = {**os.environ, "XDG_STATE_HOME": str(self.folder)}
        environment.pop("STATE_DIRECTORY", None)
        return environment

    def read_output(self):
        """Copies standard output to the log, and collects the addresses that the gateway prints there."""
        with self.process.stdout as output, self.log.open("a", encoding="utf-8") as log:
            for line in output:
                log.write(line)
                log.flush()
                self.printed += re.findall(r"http://[0-9.:]+", line)

    def wait_ready(self):
        until(self.is_ready, READY_WITHIN, "/readyz")

    def is_ready(self):
        assert self.process.poll() is None, f"the gateway exited with {self.process.returncode}\n{self.tail()}"
        # The gateway prints its addresses once it listens, the API's first.
        if len(self.printed) < 2:
            return False
        self.api, self.admin = self.printed[:2]
        try:
            with urllib.request.urlopen(self.api + "/readyz", timeout=self.probe_timeout) as response:
                return response.status == 200
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def stop(self):
        """Ends the gateway as an operator would; the return code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOPPED_WITHIN)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.reader.join(5)

    def tail(self, size=6000):
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else "no log"

    def fleet(self):
        return get_json(self.admin + "/admin/v1/fleet")

    def explain(self, model):
        """The gateway's last decision for the model of this name."""
        return get_json(f"{self.admin}/admin/v1/models/{model}/explain")

    def metrics(self, name):
        """The samples of one metric whose value is not 0; labels to value."""
        with urllib.request.urlopen(self.admin + "/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line.startswith((name + "{", name + " ")))
        return {labels: float(value) for labels, value in samples if float(value)}


@contextlib.contextmanager
def serving(gateway):
    """Yields the gateway once it serves. Stops it whatever happens meanwhile, and prints the end of its log."""
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        try:
            code = gateway.stop()
        finally:
            print(gateway.tail())
    assert code == 0, "a gateway told to stop ends its streams and its engines, and exits 0"
