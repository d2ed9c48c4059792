"""PyPI `openai`, exactly as its users have it, while models swap and against the embedded demonstration."""

import time

import openai
import pytest

from conftest import together, watching
from harness import program

# Two turns of everyone under steady load: a few of the longest turns, and the swaps between them.
LONGEST_TURN = 5
EVERYONE_TWICE_WITHIN = 180


def pretended(name, accelerators, awake, start):
    """A model of engine-sim, which is part of the gateway's program."""
    command = [program("ROUSE_GATEWAY"), "demo-engine", "--host", "${HOST}", "--port", "${PORT}", "--model", name]
    command += ["--enable-sleep-mode", "--gpu-memory-utilization", "${MEMORY_FRACTION}"]
    command += ["--start-time", start, "--wake-time", "400ms", "--sleep-time", "200ms", "--ttft", "80ms", "--itl", "25ms"]
    return {
        "name": name,
        "engine": {"kind": "vllm", "command": command, "env": {"VLLM_SERVER_DEV_MODE": "1"}},
        "accelerators": accelerators,
        "memory": {"awake": awake, "asleep": "1Gi", "host": "4Gi"},
    }


def three_models():
    """As the demonstration has them, with turns so short that a test sees several: by default one lasts two minutes."""
    return {
        "accelerators": [{"id": name, "memory": "24Gi"} for name in ("sim-0", "sim-1")],
        "host": {"sleepMemory": "64Gi"},
        "turns": {"maxTurn": f"{LONGEST_TURN}s"},
        "models": [
            pretended("large", 1, "20Gi", "3s"),
            pretended("small", 1, "12Gi", "2s"),
            pretended("wide", 2, "16Gi", "4s"),
        ],
    }


def stock_client(gateway):
    return openai.OpenAI(base_url=gateway.api + "/v1", api_key="any")


def ask(api, model, stream):
    answer = api.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=16, stream=stream
    )
    if not stream:
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason
        return
    text, finish = "", None
    for chunk in answer:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text and finish, "a stream that ends without its last chunk was cut"


def test_no_client_sees_an_error_while_models_swap(gateway):
    rouse = gateway(three_models())
    models = [model.id for model in stock_client(rouse).models.list()]
    assert len(models) >= 3, models
    history = {model: [] for model in models}

    def look():
        for model, state in rouse.models().items():
            if history[model][-1:] != [state]:
                history[model].append(state)

    def work(client):
        model, stream = client
        api, deadline, answers = stock_client(rouse), time.monotonic() + EVERYONE_TWICE_WITHIN, 0
        while any(states.count("awake") < 2 for states in history.values()):
            assert time.monotonic() < deadline, f"not everyone had two turns: {history}"
            try:
                ask(api, model, stream)
            except openai.OpenAIError as error:
                raise AssertionError(rouse.explain(model)) from error
            stream = not stream
            answers += 1
        print(f"{model}: {answers} answers")

    with watching(look):
        together(work, *[(model, stream) for stream in (True, False) for model in models])
    print(history)
    print(rouse.fleet())


def test_an_unknown_model_is_the_sdks_not_found(gateway):
    rouse = gateway()
    with pytest.raises(openai.NotFoundError) as raised:
        ask(stock_client(rouse), "no-such-model", stream=False)
    assert raised.value.code == "model_not_found"
    assert "Model 'no-such-model' not found" in str(raised.value)


def test_the_sdk_reads_the_list_and_each_model_of_it(gateway):
    rouse = gateway()
    api = stock_client(rouse)
    for model in api.models.list():
        assert api.models.retrieve(model.id).id == model.id
