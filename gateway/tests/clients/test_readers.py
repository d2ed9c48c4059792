"""Readers made by hand, and Java's HTTP client, across a cold start.

Benchmarks do not read event streams by a library. Their packages bring whole frameworks, so each has a reader here that splits and
parses as its source says; what it makes of a stream that waited must be what it makes of the engine's own.
"""

import json
import pathlib
import shutil
import subprocess
import urllib.request

import pytest

from harness import get_json
from support import MODEL, SERVED, Side, running, simulated, together

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DONE = "[DONE]"


def vllm_bench_serve(pieces):
    """Strips what arrived at once, and takes for an event what an empty line ends or what is whole JSON by itself."""
    held, events = "", []
    for piece in pieces:
        held += piece.strip().decode()
        *whole, held = held.split("\n\n")
        if is_whole(held):
            whole, held = [*whole, held], ""
        events += [parsed(event.strip()) for event in whole if event.strip() and not event.startswith(":")]
    return events


def is_whole(text):
    try:
        return text.startswith("data: ") and bool(parsed(text))
    except json.JSONDecodeError:
        return False


def parsed(event):
    data = event.removeprefix("data: ")
    return data if data == DONE else json.loads(data)


def sglang_bench_serving(pieces):
    """Every line of which something is left when it is stripped."""
    return [parsed(line.strip()) for line in lines(pieces) if line.strip()]


def llmperf(pieces):
    """The same, and does not look at the beginning that it cuts off."""
    return by_hand(line.strip().encode() + b"\n" for line in lines(pieces))


def guidellm(pieces):
    """What begins as data does, until the end is said."""
    return [parsed(line.strip()) for line in lines(pieces) if line.strip().startswith("data:")]


def by_hand(pieces):
    """Every line that is not empty: what documentation of ours says not to do."""
    data = (line[len("data: ") :] for line in lines(pieces) if line)
    return [text if text == DONE else json.loads(text) for text in data]


def lines(pieces):
    return b"".join(pieces).decode().split("\n")


READERS = {
    "vLLM's bench serve": (COMPLETIONS, vllm_bench_serve),
    "vLLM's bench serve, chat": (CHAT, vllm_bench_serve),
    "sglang's bench_serving": (COMPLETIONS, sglang_bench_serving),
    "sglang's bench_serving, chat": (CHAT, sglang_bench_serving),
    "llmperf": (CHAT, llmperf),
    "guidellm": (CHAT, guidellm),
}


def body(side, stream=True):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    hello = {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
    return json.dumps({"model": side.model, "stream": stream, **hello, **options})


def pieces(side, path, **headers):
    """A stream, as it arrived."""
    headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(side.url + path, body(side).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return list(iter(lambda: response.read1(1 << 16), b""))


class Java:
    """One process that asks by Java's own HTTP client."""

    def __init__(self, log):
        assert shutil.which("javac"), "Java runs a source file only with its compiler: apt-get install openjdk-17-jdk-headless"
        command = ["java", "-XX:TieredStopAtLevel=1", str(pathlib.Path(__file__).parent / "Lines.java")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def wait_ready(self):
        assert self.line() == "ready"

    def line(self):
        line = self.process.stdout.readline()
        assert line, "Java ended"
        return line.removesuffix("\n")

    def ask(self, url, body):
        """Status and lines of the answer."""
        self.process.stdin.write(f"{url} {body}\n")
        self.process.stdin.flush()
        status = int(self.line())
        return status, [line.removeprefix("|") for line in iter(self.line, ".")]

    def stop(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def java(tmp_path):
    with (tmp_path / "java.log").open("w+") as log:
        java = Java(log)
        try:
            yield java
        finally:
            java.stop()
            log.seek(0)
            print(log.read())


def test_benchmarks_and_java_read_a_stream_that_waited_as_the_engines_own(tmp_path, java):
    slow = simulated(MODEL, "--start-time", "3s", served=SERVED)
    with running(tmp_path, slow, stream={"grace": "100ms", "heartbeat": "300ms"}) as rouse:
        java.wait_ready()
        # guidellm asks for both before it begins.
        urllib.request.urlopen(rouse.api + "/health", timeout=10).close()
        assert [model["id"] for model in get_json(rouse.api + "/v1/models")["data"]] == [MODEL]

        through = Side("through", rouse.api, MODEL)
        calls = {name: lambda path=path: pieces(through, path) for name, (path, _) in READERS.items()}
        calls["java"] = lambda: java.ask(through.url + CHAT, body(through))
        calls["by hand"] = lambda: pieces(through, CHAT, **{"x-rouse-heartbeat": "off"})
        waited = together(calls)

        direct = Side("direct", rouse.engine(MODEL).url, SERVED)
        own = {path: pieces(direct, path) for path in [CHAT, COMPLETIONS]}
        for name, (path, reader) in READERS.items():
            assert b"".join(waited[name]).startswith(b" \n \n"), f"{name} was sent no heartbeats"
            assert reader(waited[name]) == reader(own[path]) and len(reader(own[path])) > 16, name
        assert by_hand(waited["by hand"]) == by_hand(own[CHAT])
        with pytest.raises(json.JSONDecodeError):
            by_hand(waited["guidellm"])

        status, text = waited["java"]
        assert status == 200 and text[0] == " "
        assert [line for line in text if line != " "] == b"".join(own[CHAT]).decode().removesuffix("\n").split("\n")
        status, text = java.ask(through.url + CHAT, body(through, stream=False))
        assert (status, json.loads("".join(text))["usage"]["completion_tokens"]) == (200, 16)
