"""A real engine that is not ours: launched by a client's request, streamed, idled out, and made to share."""

import time

import openai

from conftest import together, watching
from harness import until

TOKENS = 12


def config(*models):
    return {
        "accelerators": [{"id": "cpu-0", "memory": "1Gi"}],
        # The default of 1Gi would leave nothing of an accelerator this small.
        "headroom": "64Mi",
        "queue": {"maxWait": "120s"},
        "turns": {"maxTurn": "3s", "drain": {"deadline": "5s"}},
        "models": [model.entry for model in models],
    }


def client(gateway):
    # No retries: an error that the SDK would paper over is an error here.
    return openai.OpenAI(base_url=gateway.api + "/v1", api_key="any", max_retries=0, timeout=150)


def streamed(api, model):
    """One streamed answer, checked to be whole."""
    stream = api.chat.completions.create(
        model=model.name,
        messages=[{"role": "user", "content": "Say something."}],
        max_tokens=TOKENS,
        stream=True,
    )
    pieces, finish = [], None
    for chunk in stream:
        assert chunk.model == model.name
        for choice in chunk.choices:
            if choice.delta.content:
                pieces.append(choice.delta.content)
            finish = choice.finish_reason or finish
    assert finish == "length", f"a whole stream ends by its length, not with {finish}"
    assert len(pieces) == TOKENS, pieces
    return "".join(pieces)


def test_a_request_launches_an_engine_that_idles_out_and_is_launched_again(gateway, llama_model):
    model = llama_model("rouse-test-idle", idle={"sleepAfter": "1s", "stopAfter": "1s", "level": "never"})
    rouse = gateway(config(model))
    api = client(rouse)
    assert not model.processes(), "nothing runs before somebody asks"
    assert rouse.models() == {model.name: "cold"}

    begun = time.monotonic()
    streamed(api, model)
    print(f"cold, to the last byte: {time.monotonic() - begun:.2f} s")
    first = model.processes()
    assert len(first) == 1

    begun = time.monotonic()
    until(lambda: not model.processes(), 30, "an idle engine is stopped")
    print(f"idle, until its process was gone: {time.monotonic() - begun:.2f} s")
    until(lambda: rouse.models() == {model.name: "cold"}, 5, "the model is shown cold again")

    streamed(api, model)
    second = model.processes()
    assert len(second) == 1 and second.isdisjoint(first)


def test_a_plain_answer_from_a_cold_engine_comes_through_unchanged(gateway, llama_model):
    model = llama_model("rouse-test-plain")
    rouse = gateway(config(model))
    answer = client(rouse).chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": "Say something."}], max_tokens=TOKENS
    )
    assert answer.model == model.name
    assert answer.usage.completion_tokens == TOKENS
    assert answer.choices[0].message.content


def test_two_engines_with_room_for_one_take_turns_without_an_error(gateway, llama_model):
    models = [llama_model(f"rouse-test-turns-{letter}") for letter in "ab"]
    rouse = gateway(config(*models))
    launched, crowded = {model.name: set() for model in models}, []

    def look():
        first, second = models
        here, there = first.processes(), second.processes()
        launched[first.name] |= here
        launched[second.name] |= there
        # Two looks are two moments: only what is still there after the second one ran beside it.
        if here and there and here & first.processes():
            crowded.append((here, there))

    def ask_until_everyone_came_back(model):
        api, deadline, answers = client(rouse), time.monotonic() + 120, 0
        while any(len(pids) < 2 for pids in launched.values()):
            assert time.monotonic() < deadline, f"launches in 120 s: {launched}"
            try:
                streamed(api, model)
            except openai.OpenAIError as error:
                raise AssertionError(rouse.explain(model.name)) from error
            answers += 1
        print(f"{model.name}: {answers} streams")

    with watching(look, every=0.02):
        together(ask_until_everyone_came_back, *models)

    print("launches:", {name: len(pids) for name, pids in launched.items()})
    print(rouse.fleet())
    assert not crowded, f"memory for one, yet both ran: {crowded[:3]}"


def test_one_user_who_alternates_waits_as_long_as_the_engines_take(gateway, llama_model):
    models = [llama_model(f"rouse-test-alternating-{letter}") for letter in "ab"]
    settings = config(*models)
    del settings["turns"]
    api = client(gateway(settings))

    def ask(model):
        begun = time.monotonic()
        streamed(api, model)
        return time.monotonic() - begun

    # The first start of all finds the accelerator empty; what it takes is the engine's own time.
    alone = ask(models[0])
    waits = [ask(model) for _ in range(3) for model in reversed(models)]
    print(f"alone {alone:.2f} s; taking turns:", ", ".join(f"{wait:.2f} s" for wait in waits))
    # Another engine has to end as well. A busy machine is no reason to fail; the half minute of a residency is.
    assert max(waits) < 3 * alone + 5, (alone, waits)
