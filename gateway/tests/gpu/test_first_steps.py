"""The commands of a newcomer on a real GPU: what `doctor`, `init` and `measure` say of it is what NVML says."""

import json
import subprocess

import pytest

from conftest import GIB, STARTS_WITHIN, WITHIN, Model, Sampler, gib
from harness import program, until

# The measurement and NVML's samples are of other moments.
NEAR = 0.02


@pytest.fixture(scope="module")
def model(nvml, tmp_path_factory):
    """A model that takes less than what its entry declares."""
    return Model(tmp_path_factory.mktemp("first-steps"), "gamma", 3, nvml.uuids[0], weights=4, kv=6, awake=20 * GIB)


def rouse(*arguments, codes=(0,), within=60):
    """What a command printed."""
    command = [program("ROUSE_GATEWAY"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within)
    print(done.stdout, done.stderr)
    assert done.returncode in codes, (command, done.returncode, done.stdout, done.stderr)
    return done.stdout


def config_of(folder, model, level):
    entry = {**model.entry, "idle": {**model.entry["idle"], "level": level}}
    config = {"state": str(folder / "state"), "accelerators": "auto", "headroom": str(GIB),
              "host": {"sleepMemory": "16Gi"}, "models": [entry]}
    path = folder / "rouse.yaml"
    path.write_text(json.dumps(config, indent=1))
    return path


def test_the_doctor_names_driver_gpu_and_the_program_that_holds_memory(nvml, foreign):
    def findings():
        return json.loads(rouse("doctor", "--json", codes=(0, 1)))["findings"]

    free = findings()
    driver = next(one for one in free if one["area"] == "driver")
    version = nvml.describe()["driver"]
    assert driver["level"] == "ok" and version in driver["what"], (version, driver)
    for uuid in nvml.uuids:
        assert any(one["area"] == "accelerators" and uuid in one["what"] for one in free), (uuid, free)
    holder = foreign(3)
    held = [one for one in findings() if one["area"] == "accelerators" and one["level"] == "warning"]
    if (nvml.by_pid() or {}).get(holder.pid):
        assert any(f"(pid {holder.pid})" in one["what"] and one["advice"] for one in held), held
    else:
        assert any("does not name the processes" in one["what"] for one in held), held


def test_init_proposes_the_gpus_of_the_driver(nvml, tmp_path):
    path = tmp_path / "rouse.yaml"
    report = json.loads(rouse("init", "--output", path, "--json"))
    found, memory = report["accelerators"], nvml.memory()
    assert found["kind"] == "detected" and len(found["names"]) == nvml.count, report
    assert all(nvml.describe()["device"] in name for name in found["names"]), report
    assert abs(found["capacity"] + GIB - (memory.total - memory.reserved)) <= GIB, (found, memory.total)
    assert "accelerators: auto" in path.read_text(), path.read_text()


def test_measure_finds_what_nvml_shows_at_each_level(nvml, model, tmp_path):
    path = config_of(tmp_path, model, "auto")
    with Sampler(nvml, every=0.002) as sampler:
        printed = rouse("measure", model.name, "--config", path, "--json", "--write", within=STARTS_WITHIN + 60)
    measured, pid = json.loads(printed), model.pid()
    assert measured["source"] == "meter" and measured["accelerators"] == [nvml.uuids[0]], measured
    assert [level["level"] for level in measured["levels"]] == [1, 2], measured
    own = [(sample.ended, (sample.by_pid or {}).get(pid)) for sample in sampler.samples]
    own = [(at, held) for at, held in own if held]
    assert own, "NVML does not name the engine's process, so the measurement cannot be compared"
    near = lambda found, expected: abs(found - expected) <= NEAR * expected
    most = max(held for _, held in own)
    assert near(measured["awake"], most), (gib(measured["awake"]), gib(most))
    for level in measured["levels"]:
        sleeps = [event for event in model.events("sleep") if event["level"] == level["level"]]
        wakes = [event for event in model.events("waking") if event["level"] == level["level"]]
        # A wake from level 2 has two steps, for the weights and for the KV cache.
        assert len(sleeps) == 1 and wakes, (sleeps, wakes)
        slept, woke = sleeps[0], wakes[0]
        least = min(held for at, held in own if slept["at"] < at < woke["at"])
        assert near(level["asleep"], least), (level, gib(least))
        assert level["sleep"] >= slept["took"] * 1000 - 1, (level, slept)
    written = json.loads(path.read_text())["models"][0]["memory"]
    assert written["awake"] == f"{measured['memory']['awake'] >> 20}Mi", (written, measured)
    # The engine has gone. The driver may show its memory for a moment.
    until(lambda: pid not in (nvml.by_pid() or {}), WITHIN, "the engine's memory is free")
