"""`measure` on a real engine of the CPU: its memory is the RAM of its processes, as the kernel counts it."""

import json
import pathlib
import subprocess
import threading

from harness import program, until


def proportional_set_size(pid):
    """The RAM of a process in bytes; 0 if it is gone."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def config_file(folder, model, awake):
    entry = {**model.entry, "memory": {"awake": awake}}
    text = json.dumps(
        {
            "state": str(folder / "state"),
            "accelerators": [{"id": "cpu-0", "memory": "2Gi"}],
            "headroom": "64Mi",
            "models": [entry],
        },
        indent=1,
    )
    path = folder / "rouse.yaml"
    path.write_text(text)
    return path


def test_a_model_on_the_cpu_takes_what_its_processes_have(tmp_path, llama_model):
    model = llama_model("rouse-test-measured")
    path = config_file(tmp_path, model, "1Gi")
    command = [program("ROUSE_GATEWAY"), "measure", model.name, "--config", str(path), "--json", "--write"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # The kernel is asked beside the command, which reads at other moments. The command names the model, too.
    seen, done = [], threading.Event()

    def watch():
        while not done.wait(0.01):
            seen.append(sum(proportional_set_size(pid) for pid in model.processes() - {running.pid}))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        stdout, stderr = running.communicate(timeout=120)
    finally:
        running.kill()
        done.set()
        watcher.join()
    assert running.returncode == 0, stderr
    measured = json.loads(stdout)
    print(measured, "the kernel:", max(seen))
    assert measured["source"] == "pss" and measured["levels"] == []
    assert abs(measured["awake"] - max(seen)) <= 0.02 * max(seen), (measured, max(seen))
    assert measured["start"] > 0
    written = json.loads(path.read_text())["models"][0]["memory"]["awake"]
    assert written == f"{measured['memory']['awake'] >> 20}Mi"
    until(lambda: not model.processes(), 5, "the engine is gone")

