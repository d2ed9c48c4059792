"""The stub on a real driver: its lists of accelerators, their memory, and what a launcher makes of UUIDs."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import threading
import urllib.request

import pytest

from conftest import DRY, ENGINE, MIB, WITHIN, output_of
from harness import get_json, program, until


class Stub:
    """A stub that listens on free ports of loopback; it writes to its log where."""

    def __init__(self, arguments, environment=None, without=()):
        inherited = {name: value for name, value in os.environ.items()
                     if not name.startswith("ROUSE_") and name not in ("NVIDIA_VISIBLE_DEVICES", *without)}
        self.process = subprocess.Popen(
            [program("ROUSE_STUB"), *arguments], env={**inherited, **(environment or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        self.lines = []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            self.lines.append(re.sub(r"\x1b\[[0-9;]*m", "", line))

    def address(self, pattern):
        """Where it listens: the first line of its log that fits."""

        def found():
            assert self.process.poll() is None, "".join(self.lines)
            return next((match for line in list(self.lines) if (match := re.search(pattern, line))), None)

        try:
            return "http://" + until(found, 20, f"the stub listens ({pattern})").group(1)
        except AssertionError:
            print("".join(self.lines))
            raise

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        print("".join(self.lines)[-4000:])


@pytest.fixture
def stub(nvml):
    started = []

    def start(arguments, **options):
        started.append(Stub(arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.stop()


PROXY = ["proxy", "--host", "127.0.0.1", "--probes-port", "0", "--spi-port", "0", "--proxy-port", "0"]


def test_the_proxy_lists_the_gpus_and_their_memory_as_nvml_does(nvml, stub):
    spi = stub(PROXY).address(r'spi.*?(127\.0\.0\.1:\d+)')
    assert get_json(spi + "/v1/dual-pods/accelerators") == nvml.uuids
    before = [nvml.memory(number).used for number in range(nvml.count)]
    usage = get_json(spi + "/v1/dual-pods/accelerator-memory-usage")
    after = [nvml.memory(number).used for number in range(nvml.count)]
    assert sorted(usage) == sorted(nvml.uuids)
    for uuid, least, most in zip(nvml.uuids, map(min, before, after), map(max, before, after)):
        assert least // MIB - 1 <= usage[uuid] <= most // MIB + 1, (uuid, usage[uuid], least / MIB, most / MIB)
    if not DRY:
        print(usage, output_of("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv"))


def test_the_proxy_reads_what_the_container_runtime_says_with_the_driver_s_help(nvml, stub):
    for value, expected in [("all", nvml.uuids), (nvml.uuids[0], nvml.uuids[:1]), ("0", nvml.uuids[:1])]:
        one = stub(PROXY, environment={"NVIDIA_VISIBLE_DEVICES": value})
        spi = one.address(r'spi.*?(127\.0\.0\.1:\d+)')
        assert get_json(spi + "/v1/dual-pods/accelerators") == expected, value


def test_a_launcher_translates_a_uuid_to_the_index_that_cuda_understands(nvml, stub, tmp_path):
    command = shlex.join(ENGINE)
    arguments = ["launcher", "--host", "127.0.0.1", "--port", "0", "--no-token"]
    arguments += ["--command", command, "--log-dir", str(tmp_path)]
    launcher = stub(arguments, without=("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))
    base = launcher.address(r"listening on (127\.0\.0\.1:\d+)")
    last = nvml.count - 1
    body = json.dumps({"options": "--whoami", "gpu_uuids": [nvml.uuids[last]]}).encode()
    url = base + "/v2/vllm/instances/who"
    request = urllib.request.Request(url, body, {"content-type": "application/json"}, method="PUT")
    with urllib.request.urlopen(request, timeout=20) as response:
        instance = json.load(response)
    assert instance["env_vars"]["CUDA_VISIBLE_DEVICES"] == str(last), instance

    def printed():
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(url + "/log", timeout=5) as response:
                return re.search(r"^\{.*\}$", response.read().decode(), re.MULTILINE)

    who = json.loads(until(printed, WITHIN, "the process that the launcher started prints its devices").group(0))
    assert who["visible"] == str(last) and who["order"] == "PCI_BUS_ID", who
    if not DRY:
        assert who["uuids"] == [nvml.uuids[last]], who
