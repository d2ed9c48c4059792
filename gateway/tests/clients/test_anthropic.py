"""PyPI `anthropic`: the same calls to the engine and through the gateway."""

import anthropic
import pydantic
import pytest

from harness import until

HELLO = [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"name": name, "description": name, "input_schema": SCHEMA} for name in ["book", "cancel"]]


class Trip(pydantic.BaseModel):
    """A trip."""

    city: str
    days: int


def client(side, **options):
    return anthropic.Anthropic(base_url=side.url, api_key="any", **options)


def dump(*models):
    return [model.model_dump(warnings=False) for model in models]


def messages(api, model):
    answer = api.messages.create(model=model, max_tokens=20, system="be brief", messages=HELLO)
    assert answer.content[0].text and answer.usage.output_tokens == 20
    return dump(answer)


def stream(api, model):
    events = list(api.messages.create(model=model, max_tokens=20, messages=HELLO, stream=True))
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    return dump(*events)


def stream_helper(api, model):
    with api.messages.stream(model=model, max_tokens=20, messages=HELLO) as one:
        text = "".join(one.text_stream)
        final = one.get_final_message()
    assert final.content[0].text == text
    return dump(final)


def stream_bytes(api, model):
    with api.messages.with_streaming_response.create(model=model, max_tokens=9, messages=HELLO, stream=True) as answer:
        return b"".join(answer.iter_bytes()).decode()


def tools(api, model):
    answer = api.messages.create(model=model, max_tokens=200, messages=HELLO, tools=TOOLS)
    assert [block.name for block in answer.content] == ["book", "cancel"]
    assert answer.stop_reason == "tool_use" and answer.content[0].input["city"]
    return dump(answer)


def tools_stream(api, model):
    with api.messages.stream(model=model, max_tokens=200, messages=HELLO, tools=TOOLS) as one:
        events = [event.type for event in one]
        final = one.get_final_message()
    assert events.count("input_json") > 4 and final.content[1].input["city"]
    return [events, *dump(final)]


def tool_result(api, model):
    results = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]}]
    answer = api.messages.create(model=model, max_tokens=20, messages=HELLO + results, tools=TOOLS)
    assert answer.content[0].type == "text"
    return dump(answer)


def structured(api, model):
    answer = api.messages.parse(model=model, max_tokens=200, messages=HELLO, output_format=Trip)
    assert answer.parsed_output.city
    return dump(answer)


def count_tokens(api, model):
    count = api.messages.count_tokens(model=model, system="be brief", messages=HELLO)
    assert count.input_tokens == 6
    return dump(count)


CALLS = [messages, stream, stream_helper, stream_bytes, tools, tools_stream, tool_result, structured, count_tokens]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_answer_is_the_engines(call, direct, through, engine):
    expected = call(client(direct), direct.model)
    before = engine.counters()["total"]
    assert call(client(through), through.model) == expected
    assert engine.counters()["total"] > before


def test_a_bad_request_is_refused_in_the_engines_words(direct, through):
    def refused(side):
        with pytest.raises(anthropic.BadRequestError) as raised:
            client(side).messages.create(model=side.model, max_tokens=0, messages=HELLO)
        return raised.value.status_code, raised.value.body

    assert refused(through) == refused(direct)


def test_an_unknown_model_is_not_found(side):
    for call in [messages, stream, count_tokens]:
        with pytest.raises(anthropic.NotFoundError) as raised:
            call(client(side), "no-such-model")
        assert raised.value.body["type"] == "error" and raised.value.body["error"]["message"]


def test_an_unknown_models_error_has_anthropics_type(through):
    with pytest.raises(anthropic.NotFoundError) as raised:
        messages(client(through), "no-such-model")
    assert raised.value.type == "not_found_error"


@pytest.mark.parametrize("call", [messages, stream], ids=lambda call: call.__name__)
def test_an_engine_that_fails_once_is_asked_again(call, side, engine):
    before = engine.counters()
    engine.fault(fail_next=1)
    assert call(client(side), side.model)
    assert engine.counters()["total"] == before["total"] + 2
    engine.fault(fail_next=1)
    with pytest.raises(anthropic.InternalServerError) as raised:
        call(client(side, max_retries=0), side.model)
    assert raised.value.status_code == 503


def test_a_stream_that_is_closed_stops_the_engine_within_a_second(side, engine):
    one = client(side).messages.create(model=side.model, max_tokens=5000, messages=HELLO, stream=True)
    for _ in range(8):
        next(one)
    assert engine.busy() == 1
    one.close()
    until(lambda: engine.busy() == 0, 1, "the engine stopped")


def test_a_client_that_gives_up_waiting_stops_the_engine_within_a_second(side, engine):
    with pytest.raises(anthropic.APITimeoutError):
        client(side, max_retries=0, timeout=0.5).messages.create(model=side.model, max_tokens=5000, messages=HELLO)
    until(lambda: engine.busy() == 0, 1, "the engine stopped")


@pytest.mark.parametrize("call", [stream, tools_stream], ids=lambda call: call.__name__)
@pytest.mark.parametrize("fault", ["cut_mid_stream", "fin_mid_stream"])
def test_a_stream_that_the_engine_breaks_off_is_an_error_and_no_end(call, fault, through, engine):
    engine.fault(**{fault: 6})
    try:
        with pytest.raises(anthropic.APIError) as raised:
            call(client(through), through.model)
    finally:
        engine.fault(**{fault: None})
    # An error event is made an exception of the status, and that was 200.
    assert getattr(raised.value, "status_code", 200) == 200
