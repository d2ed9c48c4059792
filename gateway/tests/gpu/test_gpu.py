"""The gateway on a real GPU: what it measures, and that models take turns on memory that is really there.

Two models share the GPU, and only one of them fits awake (conftest.World). Each test begins with whatever the one
before it left, and asks for what it needs.
"""

import os
import re
import signal
import statistics
import threading
import time

from conftest import DRY, GIB, MIB, WITHIN, Sampler, gib, output_of
from harness import until

# What a model's memory may differ from one reading to the next: caches of cuBLAS, pages of the driver.
TOLERANCE = 256 * MIB
TURNS = 6
# The kernel tells the start of a process to the tick, rounded down.
CLOCK_TICK = 0.02


def test_the_gateway_finds_the_gpus_by_their_uuids_with_what_the_driver_leaves(world):
    rouse = world.gateway
    found = {one["id"]: one for one in rouse.ps()["accelerators"]}
    assert sorted(found) == sorted(world.nvml.uuids)
    if not DRY:
        smi = output_of("nvidia-smi", "-L")
        assert sorted(found) == sorted(re.findall(r"UUID: (GPU-[0-9a-f-]+)", smi)), smi
    for number, uuid in enumerate(world.nvml.uuids):
        memory = world.nvml.memory(number)
        expected = memory.total - memory.reserved - world.headroom
        assert found[uuid]["capacity"] == expected, (found[uuid], memory.total, memory.reserved, world.headroom)
        assert found[uuid]["healthy"]
    shown = rouse.run("ps")
    assert world.uuid in shown, shown
    world.note("check", rouse.run("check", str(rouse.config)).strip())


def test_two_models_of_which_one_fits_take_turns(world):
    rouse, both = world.gateway, world.models
    with Sampler(world.nvml) as sampler:
        # Both have to have started: from then on, one sleeps where the other is awake.
        starts = [world.ask(model) for model in both]
        assert starts[0]["digest"] != starts[1]["digest"], "two models with other weights answer differently"
        turns, begun_cpu, begun_at = [], rouse.cpu_seconds(), time.time()
        for turn in range(TURNS):
            falls, rises = both[(turn + 1) % 2], both[turn % 2]
            alone = world.ask(falls)["first"]
            waited = world.ask(rises)
            slept, woke = falls.last("sleep"), rises.last("wake")
            assert slept["at"] >= waited["asked_at"] and woke["at"] >= waited["asked_at"], (slept, woke, waited)
            # The promise concerns the wait; what an awake model takes to its first token is not part of it.
            own, wait = slept["took"] + woke["took"], waited["first"] - alone
            line = rouse.access_line(waited["id"]) if waited["id"] else {}
            turns.append({
                "from": falls.name, "to": rises.name, "to_first_token": waited["first"], "awake_first_token": alone,
                "wait": wait, "waited_ms_of_the_gateway": line.get("waited_ms"), "sleep": slept["took"],
                "wake": woke["took"], "own": own, "beyond": wait - own, "limit": 1.2 * own + 0.1,
            })
        cpu, elapsed = rouse.cpu_seconds() - begun_cpu, time.time() - begun_at
    readings = [at for at, _, _ in rouse.readings(world.uuid)]
    world.note("turns", turns)
    world.note("starts", [{model.name: [model.last("load"), model.last("ready")]} for model in both])
    world.note("memory_while_taking_turns", {"most": sampler.most(), "samples": len(sampler.samples)})
    world.note("gateway_while_taking_turns", {
        "seconds": elapsed, "cpu_seconds": cpu, "turns": TURNS,
        "readings_of_the_meter": len([at for at in readings if at >= begun_at]),
        "swaps": rouse.metric("rouse_swaps_total"),
    })
    assert sampler.most() <= world.capacity + world.headroom, gib(sampler.most())
    first, second = (model.awake_intervals() for model in both)
    together = [(a, b) for a in first for b in second if a[0] < b[1] and b[0] < a[1]]
    assert not together, f"both were awake at once: {together}"
    assert statistics.median(turn["wait"] - turn["limit"] for turn in turns) <= 0, turns


def test_a_model_that_slept_at_level_2_answers_as_before(world):
    world.ask(world.alpha)
    begun = time.monotonic()
    world.gateway.put_to_sleep(world.alpha, level=2)
    assert world.alpha.last("sleep")["level"] == 2
    slept = time.monotonic() - begun
    woken = world.ask(world.alpha)
    assert world.alpha.last("reload")["at"] >= woken["asked_at"]
    world.note("level_2", {"sleep_order": slept, "to_first_token": woken["first"]})


def test_memory_is_charged_to_the_engine_whose_processes_hold_it(world):
    rouse, awake, asleep = world.gateway, world.alpha, world.beta
    world.ask(asleep)
    world.ask(awake)
    until(lambda: rouse.state(asleep) == "asleep", WITHIN, f"{asleep.name} sleeps")
    # The gateway reads the meter once after a model became awake.
    since = awake.last("waking", "load")["at"]
    until(lambda: [at for at, _, _ in rouse.readings(world.uuid) if at > since], WITHIN, "a reading since the wake")
    time.sleep(0.5)
    used, by_pid, fleet = world.nvml.used(), world.nvml.by_pid(), rouse.ps()
    _, read_used, by_engine = rouse.readings(world.uuid)[-1]
    engines = {f"{model.name}#0": model for model in (awake, asleep)}
    pids = {name: model.pid() for name, model in engines.items()}
    facts = {"used": used, "by_pid": by_pid, "pids": pids, "gateway_used": read_used, "gateway_by_engine": by_engine}
    world.note("memory_by_process", facts)
    accelerator = next(one for one in fleet["accelerators"] if one["id"] == world.uuid)
    assert abs(accelerator["observed"] - used) <= TOLERANCE, (accelerator, facts)
    ours = {name: (by_pid or {}).get(pid) for name, pid in pids.items()}
    if not any(ours.values()):
        # NVML cannot tell here whose memory it is: another pid namespace, or a driver that does not say.
        world.note("memory_by_process_is", f"not known here: NVML lists {by_pid}, and the engines are {pids}")
        assert by_engine is None, (
            "NVML does not say which memory is whose, so the gateway must not take it for that of no engine: "
            f"{facts}"
        )
        return
    world.note("memory_by_process_is", "known")
    for name, held in ours.items():
        assert abs(by_engine[name] - held) <= TOLERANCE, (name, facts)
    shown = {one["engine"]: one for one in fleet["engines"]}
    assert shown[f"{awake.name}#0"]["reserved"] >= awake.awake
    residue = shown[f"{asleep.name}#0"]["reserved"]
    assert ours[f"{asleep.name}#0"] - TOLERANCE <= residue <= max(asleep.asleep, ours[f"{asleep.name}#0"]) + TOLERANCE
    peak = next(one["learned"]["peak"] for one in fleet["models"] if one["name"] == awake.name)
    assert peak and peak >= ours[f"{awake.name}#0"] - TOLERANCE, (peak, facts)
    # The declaration of these tests is right: memory.awake holds what the engine takes.
    assert peak <= awake.awake, (gib(peak), gib(awake.awake))


def test_an_engine_sees_its_gpu_and_no_other(world):
    if not world.alpha.events("ready"):
        world.ask(world.alpha)
    start, ready = world.alpha.last("start"), world.alpha.last("ready")
    assert start["visible"] == world.uuid, start
    assert ready["devices"] == 1, ready
    if ready["device_uuid"]:
        assert ready["device_uuid"].removeprefix("GPU-") == world.uuid.removeprefix("GPU-"), ready


def kill_and_ask(world, killed, asked, begins):
    """Kills an awake engine, asks for the other model, and compares when its engine began with when memory was free."""
    world.ask(killed)
    pid = killed.pid()
    with Sampler(world.nvml) as sampler:
        time.sleep(0.1)
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        answer = world.ask(asked)
        begun = begins(asked)
    assert begun >= at, (begun, at)
    before = sampler.last_before(begun)
    # The engine's own residue is in use while it sleeps, and it is part of what it may take.
    limit = world.capacity - asked.awake + asked.asleep
    free = sampler.first_after(at, lambda sample: sample.used <= limit)
    readings = [(when - at, used) for when, used, _ in world.gateway.readings(world.uuid) if at <= when <= begun]
    figures = {
        "used_when_killed": sampler.last_before(at).used,
        "free_after": free.ended - at if free else None,
        "began_after": begun - at,
        "used_when_it_began": before.used,
        "may_be_used": limit,
        "to_first_token": answer["first"],
        "readings_of_the_gateway": readings[-20:],
    }
    world.note(f"{killed.name}_killed_and_{asked.name}_asked", figures)
    assert figures["used_when_killed"] > limit, f"the killed engine held too little to show anything: {figures}"
    assert before.used <= limit, f"it began while the memory was still in use: {figures}"
    assert readings and readings[-1][1] <= limit, f"the gateway's own last reading showed no room: {figures}"


def test_after_a_kill_the_other_model_wakes_only_once_the_memory_is_free(world):
    world.ask(world.beta)
    kill_and_ask(world, world.alpha, world.beta, lambda model: model.last("waking")["at"])


def test_after_a_kill_the_other_model_starts_only_once_the_memory_is_free(world):
    world.ask(world.beta)
    world.gateway.order(world.alpha, "stop")
    until(lambda: world.gateway.state(world.alpha) in ("cold", "failed"), WITHIN, "alpha is stopped")
    kill_and_ask(world, world.beta, world.alpha, lambda model: model.last("start")["created"] + CLOCK_TICK)


def test_another_programs_memory_is_shown_and_waited_for(world, foreign):
    rouse, model = world.gateway, world.alpha
    world.ask(model)
    rouse.put_to_sleep(*world.models)
    # So much that the model has no room beside it, even if the other one were stopped.
    size = (world.capacity - model.awake) // GIB + 4
    before = world.nvml.used()
    holder = foreign(size)
    until(lambda: world.nvml.used() >= before + (size - 1) * GIB, 10, "NVML shows the other program's memory")
    # The gateway may grant memory by a reading that is up to a second old, and that one shows nothing of this.
    time.sleep(1.2)
    with Sampler(world.nvml) as sampler:
        outcome = {}

        def ask():
            try:
                outcome["answer"] = world.ask(model)
            except BaseException as error:
                outcome["error"] = error

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        reasons, shown = [], None
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline and asking.is_alive():
            reason = rouse.explain(model)["reason"]
            reasons += [reason] if not reasons or reasons[-1] != reason else []
            shown = rouse.accelerator(world.uuid)
            time.sleep(0.2)
        waits, table = asking.is_alive(), rouse.run("ps")
        holder.kill()
        holder.wait()
        ended = time.time()
        asking.join(WITHIN)
        still = asking.is_alive()
    free = sampler.first_after(ended - 1, lambda sample: sample.used <= before + GIB)
    woke = model.last("waking", "start")
    figures = {
        "held": size * GIB, "reasons": reasons, "accelerator": shown,
        "free_after": free.ended - ended if free else None,
        "woke_after": woke["at"] - ended, "to_first_token": outcome.get("answer", {}).get("first"),
    }
    world.note("another_program", figures)
    assert waits, f"the model did not wait for the other program's memory: {figures} {outcome}"
    assert shown is not None, figures
    assert shown["observed"] - shown["reserved"] >= (size - 3) * GIB, (figures, table)
    assert any("the meter does not show" in reason for reason in reasons), reasons
    assert not still and "error" not in outcome, (outcome, figures)
    assert woke["at"] >= ended, figures
    # The meter is read again each second while another program's memory is in the way.
    assert figures["woke_after"] <= 5, figures


def test_what_a_reading_of_the_meter_costs(world):
    took = {"memory": [], "processes": []}
    for _ in range(50):
        begun = time.monotonic()
        world.nvml.used()
        between = time.monotonic()
        world.nvml.by_pid()
        took["memory"].append(between - begun)
        took["processes"].append(time.monotonic() - between)
    figures = {name: {"median_ms": statistics.median(all_) * 1000, "most_ms": max(all_) * 1000}
               for name, all_ in took.items()}
    rouse = world.gateway
    figures["gateway"] = {name: rouse.metric(name) for name in (
        "rouse_swaps_total", "rouse_transition_duration_seconds_sum",
        "rouse_transition_duration_seconds_count", "rouse_wait_seconds_sum", "rouse_wait_seconds_count",
    )}
    figures["gateway"] |= {"readings": len(rouse.readings(world.uuid)), "cpu_seconds": rouse.cpu_seconds()}
    world.note("cost_of_a_reading", figures)
    # The gateway waits for the meter in each turn: the aim of 100 ms beyond the engines' own times must hold.
    assert figures["memory"]["median_ms"] + figures["processes"]["median_ms"] < 100, figures
