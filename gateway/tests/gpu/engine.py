"""A small engine with vLLM's routes that holds real accelerator memory, for the tests on a real GPU.

Its weights are random bf16 matrices of 1 GiB each, made from a seed. Each token of an answer is the largest of the
products of all matrices with a vector that the token before determines. So an answer depends on every weight, and an
engine that lost its weights while it slept answers differently. Its KV cache is memory that it allocates and zeroes.

    engine.py --port 8000 --name alpha --weights 4 --kv 40 --report alpha.jsonl

The report has one JSON object a line: what the engine did, when (Unix time) and how long it took by its own clock.
Tests read the report, since it outlives the engine and no gateway stands between. Two more uses need no torch:

    engine.py --hold 30    # another program: allocates 30 GiB through the CUDA driver, prints "held", and waits
    engine.py --whoami     # prints the devices that CUDA shows to this process, as JSON

ENGINE_DEVICE=cpu replaces the GPU: the weights are a few numbers, and the memory is only written to the folder that
fake_nvml.c reads (FAKE_NVML_DIR).
"""

import time

FIRST_LINE_AT = time.time()

import argparse
import ctypes
import gc
import http.server
import json
import os
import pathlib
import random
import sys
import threading
import urllib.parse
import uuid

GIB = 1 << 30
# A matrix of this shape takes 1 GiB in bf16.
ROWS, COLUMNS = 8192, 65536
DEFAULT_TOKENS = 16


def simulated():
    return os.environ.get("ENGINE_DEVICE") == "cpu"


class CudaModel:
    """Weights and KV cache on the one device that CUDA shows to this process."""

    def __init__(self, seed, weights, kv):
        import torch

        self.torch = torch
        self.seed, self.count, self.kv_bytes = seed, weights, kv * GIB
        self.device = torch.device("cuda:0")
        torch.cuda.init()
        self.weights, self.kv, self.loaded = None, None, False
        self.allocate_weights()
        self.load_weights()
        self.allocate_kv()
        # Pinned once, as the copies of every sleep go there: to pin memory takes longer than to copy.
        self.pinned = True
        try:
            self.copies = [self.host_matrix(pinned=True) for _ in range(weights)]
        except RuntimeError as error:
            print(f"host memory is not pinned: {error}", file=sys.stderr, flush=True)
            self.pinned = False
            self.copies = [self.host_matrix(pinned=False) for _ in range(weights)]
        # The first product loads cuBLAS, which no request should wait for.
        self.next_token(0)

    def host_matrix(self, pinned):
        return self.torch.empty((ROWS, COLUMNS), dtype=self.torch.bfloat16, pin_memory=pinned)

    def allocate_weights(self):
        shape, dtype = (ROWS, COLUMNS), self.torch.bfloat16
        self.weights = [self.torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(self.count)]
        self.loaded = False
        self.torch.cuda.synchronize()

    def load_weights(self):
        for number, matrix in enumerate(self.weights):
            generator = self.torch.Generator(device=self.device)
            generator.manual_seed(self.seed * 1000 + number)
            matrix.normal_(generator=generator)
        self.loaded = True
        self.torch.cuda.synchronize()

    def allocate_kv(self):
        self.kv = self.torch.zeros(self.kv_bytes, dtype=self.torch.uint8, device=self.device)
        self.torch.cuda.synchronize()

    def save_weights(self):
        for copy, matrix in zip(self.copies, self.weights):
            copy.copy_(matrix, non_blocking=True)
        self.torch.cuda.synchronize()

    def restore_weights(self):
        for copy, matrix in zip(self.copies, self.weights):
            matrix.copy_(copy, non_blocking=True)
        self.loaded = True
        self.torch.cuda.synchronize()

    def release(self):
        self.weights, self.kv = None, None
        gc.collect()
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()

    def next_token(self, token):
        torch = self.torch
        with torch.inference_mode():
            steps = torch.arange(COLUMNS, dtype=torch.float32, device=self.device)
            vector = torch.sin(steps * (0.001 * (token % 4096 + 1))).to(torch.bfloat16).unsqueeze(1)
            products = torch.cat([torch.matmul(matrix, vector) for matrix in self.weights])
            self.kv[token % self.kv_bytes] = token & 255
            # The CPU's argmax takes the first of equal numbers.
            return int(torch.argmax(products.float().cpu().flatten()))

    def describe(self):
        properties = self.torch.cuda.get_device_properties(0)
        return {
            "torch": self.torch.__version__,
            "devices": self.torch.cuda.device_count(),
            "device": properties.name,
            "device_uuid": str(getattr(properties, "uuid", "")),
            "pinned": self.pinned,
        }


class SimulatedModel:
    """The same without a GPU: a few numbers, and memory that is booked for fake_nvml.c."""

    CONTEXT = 512 << 20
    COPY_TIME = 0.1

    def __init__(self, seed, weights, kv):
        self.seed, self.weights_bytes, self.kv_bytes = seed, weights * GIB, kv * GIB
        self.copies, self.weights, self.kv, self.loaded = None, None, None, False
        self.allocate_weights()
        self.load_weights()
        self.allocate_kv()

    def allocate_weights(self):
        self.weights, self.loaded = [0] * 256, False
        self.book()

    def load_weights(self):
        numbers = random.Random(self.seed)
        self.weights, self.loaded = [numbers.randrange(1 << 20) for _ in range(256)], True

    def allocate_kv(self):
        self.kv = True
        self.book()

    def save_weights(self):
        time.sleep(self.COPY_TIME)
        self.copies = list(self.weights)

    def restore_weights(self):
        time.sleep(self.COPY_TIME)
        self.weights, self.loaded = list(self.copies), True

    def release(self):
        self.weights, self.kv = None, None
        self.book()

    def book(self):
        weights = self.weights_bytes if self.weights else 0
        book(self.CONTEXT + weights + (self.kv_bytes if self.kv else 0))

    def next_token(self, token):
        return sum(weight * ((token + place) % 251 + 1) for place, weight in enumerate(self.weights)) % 32768

    def describe(self):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return {"torch": None, "devices": len(visible.split(",")), "device_uuid": visible, "pinned": False}


def book(size):
    """Writes what this process holds to where fake_nvml.c reads it."""
    path = pathlib.Path(os.environ["FAKE_NVML_DIR"]) / str(os.getpid())
    new = path.with_suffix(".new")
    new.write_text(str(size))
    new.rename(path)


class Refused(Exception):
    """The engine answers this request with an error."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Engine:
    def __init__(self, arguments):
        self.name = arguments.name
        self.report = pathlib.Path(arguments.report) if arguments.report else None
        # One request, sleep or wake at a time.
        self.lock = threading.Lock()
        self.counting = threading.Lock()
        self.running, self.prompt_tokens, self.generation_tokens = 0, 0, 0
        self.asleep, self.level = False, None
        begun = time.monotonic()
        self.tell("start", created=created_at(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
        if simulated():
            model = SimulatedModel
        else:
            import torch  # noqa: F401

            model = CudaModel
        imported = time.monotonic()
        self.tell("load", importing=imported - begun)
        self.model = model(arguments.seed, arguments.weights, arguments.kv)
        self.tell("ready", loading=time.monotonic() - imported, **self.model.describe())

    def tell(self, what, **details):
        line = json.dumps({"event": what, "at": time.time(), "pid": os.getpid(), "name": self.name, **details})
        print(line, flush=True)
        if self.report:
            with self.report.open("a") as report:
                report.write(line + "\n")

    def count(self, running=0, prompt=0, generation=0):
        with self.counting:
            self.running += running
            self.prompt_tokens += prompt
            self.generation_tokens += generation

    def tokens(self, prompt, count):
        """The tokens of the answer, one at a time."""
        self.count(running=1, prompt=1)
        try:
            with self.lock:
                if self.asleep:
                    raise Refused(500, "the engine sleeps")
                token = sum(prompt.encode()) % 4096
                for _ in range(count):
                    token = self.model.next_token(token)
                    self.count(generation=1)
                    yield token
        finally:
            self.count(running=-1)

    def sleep(self, level):
        begun, began_at = time.monotonic(), time.time()
        with self.lock:
            if self.asleep:
                return
            if level == 1:
                self.model.save_weights()
            self.model.release()
            self.asleep, self.level = True, level
        self.tell("sleep", level=level, began=began_at, took=time.monotonic() - begun)

    def wake(self, tags):
        begun, began_at = time.monotonic(), time.time()
        with self.lock:
            if not self.asleep:
                return
            # Told before the first byte is allocated: the memory must be free now.
            self.tell("waking", level=self.level, tags=tags)
            if (not tags or "weights" in tags) and self.model.weights is None:
                self.model.allocate_weights()
                if self.level == 1:
                    self.model.restore_weights()
            if (not tags or "kv_cache" in tags) and self.model.kv is None:
                self.model.allocate_kv()
            self.asleep = self.model.weights is None or self.model.kv is None
        self.tell("wake", level=self.level, tags=tags, began=began_at, took=time.monotonic() - begun)

    def reload_weights(self):
        begun, began_at = time.monotonic(), time.time()
        with self.lock:
            self.model.load_weights()
        self.tell("reload", began=began_at, took=time.monotonic() - begun)

    def metrics(self):
        with self.counting:
            values = {
                "vllm:num_requests_running": self.running,
                "vllm:num_requests_waiting": 0,
                "vllm:prompt_tokens_total": self.prompt_tokens,
                "vllm:generation_tokens_total": self.generation_tokens,
            }
        return "".join(f'{name}{{model_name="{self.name}"}} {value}\n' for name, value in values.items())


def created_at():
    """When the kernel created this process; the first line of this program where /proc does not tell."""
    try:
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        created = time.time() - age
    except (OSError, ValueError, IndexError):
        return FIRST_LINE_AT
    return created if FIRST_LINE_AT - 30 < created <= FIRST_LINE_AT + 0.1 else FIRST_LINE_AT


def handler_for(engine):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are two writes, and the second must not wait for the client's acknowledgement.
        disable_nagle_algorithm = True

        def log_message(self, *_):
            pass

        def do_GET(self):
            self.serve({"/health": self.health, "/v1/models": self.models, "/metrics": self.metrics,
                        "/is_sleeping": self.is_sleeping})

        def do_POST(self):
            self.serve({"/v1/chat/completions": self.chat, "/v1/completions": self.text, "/sleep": self.sleep,
                        "/wake_up": self.wake_up, "/collective_rpc": self.collective_rpc,
                        "/reset_prefix_cache": self.reset_prefix_cache})

        def serve(self, routes):
            url = urllib.parse.urlsplit(self.path)
            self.query = urllib.parse.parse_qs(url.query)
            self.begun = False
            try:
                self.content = self.body()
                route = routes.get(url.path)
                if route is None:
                    raise Refused(404, f"no route {url.path}")
                route()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            except Exception as error:
                status = error.status if isinstance(error, Refused) else 500
                engine.tell("error", path=self.path, status=status, message=f"{type(error).__name__}: {error}")
                if self.begun:
                    # A stream without its end: the client must see that it broke.
                    self.close_connection = True
                else:
                    self.json({"error": {"message": str(error), "code": status}}, status)
                if "out of memory" in str(error).lower():
                    os._exit(1)

        def body(self):
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                whole = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    whole += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return whole
            return self.rfile.read(int(self.headers.get("content-length") or 0))

        def answer(self, body, kind, status=200):
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def json(self, value, status=200):
            self.answer(json.dumps(value).encode(), "application/json", status)

        def health(self):
            self.json({})

        def models(self):
            self.json({"object": "list", "data": [{"id": engine.name, "object": "model"}]})

        def metrics(self):
            self.answer(engine.metrics().encode(), "text/plain; version=0.0.4")

        def is_sleeping(self):
            self.json({"is_sleeping": engine.asleep})

        def sleep(self):
            engine.sleep(int(self.query.get("level", ["1"])[0]))
            self.json({})

        def wake_up(self):
            engine.wake(self.query.get("tags", []))
            self.json({})

        def collective_rpc(self):
            if json.loads(self.content or b"{}").get("method") == "reload_weights":
                engine.reload_weights()
            self.json({"results": []})

        def reset_prefix_cache(self):
            self.json({})

        def chat(self):
            request = json.loads(self.content)
            prompt = "\n".join(str(message.get("content")) for message in request["messages"])
            self.generate(request, prompt, "chat.completion", lambda text: {"delta": {"content": text}},
                          lambda text: {"message": {"role": "assistant", "content": text}})

        def text(self):
            request = json.loads(self.content)
            piece = lambda text: {"text": text}
            self.generate(request, str(request["prompt"]), "text_completion", piece, piece)

        def generate(self, request, prompt, kind, piece, whole):
            if request.get("model") != engine.name:
                raise Refused(404, f"this engine serves {engine.name}, not {request.get('model')}")
            count = int(request.get("max_completion_tokens") or request.get("max_tokens") or DEFAULT_TOKENS)
            head = {"id": f"gen-{uuid.uuid4().hex}", "created": int(time.time()), "model": engine.name}
            usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
            tokens = (f"{token} " for token in engine.tokens(prompt, count))
            if not request.get("stream"):
                choice = {"index": 0, "finish_reason": "length", **whole("".join(tokens))}
                return self.json({**head, "object": kind, "choices": [choice], "usage": usage})
            kind += ".chunk" if kind == "chat.completion" else ""
            first = next(tokens)
            self.begun = True
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.event({**head, "object": kind, "choices": [{"index": 0, "finish_reason": None, **piece(first)}]})
            for token in tokens:
                self.event({**head, "object": kind, "choices": [{"index": 0, "finish_reason": None, **piece(token)}]})
            last = {"index": 0, "finish_reason": "length", **piece("")}
            self.event({**head, "object": kind, "choices": [last], "usage": usage})
            self.chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

        def event(self, value):
            self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

        def chunk(self, data):
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    return Handler


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


class Driver:
    """The few calls of the CUDA driver that other programs' memory needs."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} failed with {code}")

    def uuids(self):
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        found = []
        for number in range(count.value):
            device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
            self.call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
            found.append(f"GPU-{uuid.UUID(bytes=bytes(raw))}")
        return found

    def allocate(self, size):
        device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))


def hold(gib):
    """Holds memory as any other program on the machine would, until it is killed."""
    if simulated():
        book(gib * GIB)
    else:
        Driver().allocate(gib * GIB)
    print("held", flush=True)
    threading.Event().wait()


def whoami():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    uuids = [visible] if simulated() else Driver().uuids()
    order = os.environ.get("CUDA_DEVICE_ORDER")
    print(json.dumps({"visible": visible, "order": order, "uuids": uuids}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--name", default="model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weights", type=int, default=4, help="GiB")
    parser.add_argument("--kv", type=int, default=4, help="GiB")
    parser.add_argument("--report", help="file for one JSON object a line")
    parser.add_argument("--enable-sleep-mode", action="store_true", help="as vLLM has it; sleep mode is always on")
    parser.add_argument("--hold", type=int, metavar="GIB")
    parser.add_argument("--whoami", action="store_true")
    arguments = parser.parse_args()
    if arguments.hold:
        return hold(arguments.hold)
    if arguments.whoami:
        return whoami()
    engine = Engine(arguments)
    Server((arguments.host, arguments.port), handler_for(engine)).serve_forever()


if __name__ == "__main__":
    main()
