"""PyPI `openai`: the same calls to the engine and through the gateway."""

import asyncio
import io

import openai
import pydantic
import pytest

from harness import until
from support import Side

FILE = bytes(range(256)) * 700
HELLO = [{"role": "user", "content": "Tell me a story."}]


class Trip(pydantic.BaseModel):
    """A trip."""

    city: str
    days: int
    stops: list[str]


TOOLS = [openai.pydantic_function_tool(Trip, name="book"), openai.pydantic_function_tool(Trip, name="cancel")]
FLAT_TOOLS = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]


def client(side, **options):
    return openai.OpenAI(base_url=side.url + "/v1", api_key="any", **options)


def dump(*models):
    # What was parsed has a type of ours, of which the client's own models know nothing.
    return [model.model_dump(warnings=False) for model in models]


def chat(api, model):
    answer = api.chat.completions.create(model=model, messages=HELLO)
    assert answer.choices[0].message.content and answer.usage.completion_tokens
    return dump(answer)


def chat_stream(api, model):
    chunks = list(api.chat.completions.create(model=model, messages=HELLO, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop" and all(chunk.usage is None for chunk in chunks)
    return dump(*chunks)


def chat_stream_with_usage(api, model):
    usage = {"include_usage": True}
    chunks = list(api.chat.completions.create(model=model, messages=HELLO, n=3, stream=True, stream_options=usage))
    assert chunks[-1].usage.completion_tokens == 48
    return dump(*chunks)


def chat_stream_bytes(api, model):
    with api.chat.completions.with_streaming_response.create(model=model, messages=HELLO, stream=True) as answer:
        return b"".join(answer.iter_bytes()).decode()


def completions(api, model):
    return dump(api.completions.create(model=model, prompt=["a", "b"], max_tokens=5))


def completions_stream(api, model):
    return dump(*api.completions.create(model=model, prompt="a", max_tokens=5, stream=True))


def tools(api, model):
    answer = api.chat.completions.parse(model=model, messages=HELLO, tools=TOOLS)
    trips = [call.function.parsed_arguments for call in answer.choices[0].message.tool_calls]
    assert [type(trip) for trip in trips] == [Trip, Trip]
    return dump(answer)


def tools_stream(api, model):
    chunks = list(api.chat.completions.create(model=model, messages=HELLO, tools=TOOLS, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {call.index for call in calls} == {0, 1} and len(calls) > 6
    return dump(*chunks)


def tools_stream_helper(api, model):
    with api.chat.completions.stream(model=model, messages=HELLO, tools=TOOLS) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert events.count("tool_calls.function.arguments.done") == 2
    assert all(call.function.parsed_arguments.city for call in final.choices[0].message.tool_calls)
    return [events, *dump(final)]


def tool_result(api, model):
    messages = [*HELLO, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
    answer = api.chat.completions.create(model=model, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content
    return dump(answer)


def structured(api, model):
    answer = api.chat.completions.parse(model=model, messages=HELLO, response_format=Trip)
    assert answer.choices[0].message.parsed.days >= 0
    return dump(answer)


def structured_stream(api, model):
    with api.chat.completions.stream(model=model, messages=HELLO, response_format=Trip) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed.city
    return [events, *dump(final)]


def responses(api, model):
    answer = api.responses.create(model=model, input="hi", instructions="be brief", previous_response_id="resp_1")
    assert answer.output_text and answer.previous_response_id == "resp_1"
    return dump(answer)


def responses_stream(api, model):
    events = list(api.responses.create(model=model, input="hi", stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return dump(*events)


def responses_structured(api, model):
    answer = api.responses.parse(model=model, input="hi", text_format=Trip)
    assert answer.output_parsed.city
    return dump(answer)


def responses_tools_stream(api, model):
    with api.responses.stream(model=model, input="hi", tools=FLAT_TOOLS) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_response()
    assert events.count("response.function_call_arguments.done") == 2
    assert [item.name for item in final.output] == ["book", "cancel"]
    return [events, *dump(final)]


def embeddings(api, model):
    answer = api.embeddings.create(model=model, input=["a", "b"], dimensions=16)
    assert len(answer.data[1].embedding) == 16
    return dump(answer)


def transcription(api, model):
    heard = api.audio.transcriptions.create(model=model, file=("a.wav", io.BytesIO(FILE)), language="en")
    assert heard.text.startswith(f"{len(FILE)} bytes")
    return dump(heard)


def transcription_stream(api, model):
    events = list(api.audio.transcriptions.create(model=model, file=("a.wav", FILE), stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text.startswith(f"{len(FILE)} bytes")
    return dump(*events)


def translation(api, model):
    return dump(api.audio.translations.create(model=model, file=("a.wav", FILE)))


def speech(api, model):
    with api.audio.speech.with_streaming_response.create(model=model, input="hi", voice="alloy") as answer:
        return [answer.headers["content-type"], b"".join(answer.iter_bytes()).hex()]


def images(api, model):
    return dump(api.images.generate(model=model, prompt="a cat", n=2, response_format="b64_json"))


def moderations(api, model):
    return dump(api.moderations.create(model=model, input=["a", "b"]))


def rerank(api, model):
    ask = {"model": model, "query": "q", "documents": ["a", "b", "c"], "top_n": 2}
    root = api.with_options(base_url=str(api.base_url).removesuffix("v1/"))
    return [api.post("/rerank", body=ask, cast_to=object)] + [
        root.post(path, body=ask, cast_to=object) for path in ["/rerank", "/v2/rerank"]
    ]


def score(api, model):
    ask = {"model": model, "text_1": "q", "text_2": ["a", "b"]}
    return api.post("/score", body=ask, cast_to=object)


def tokenize(api, model):
    root = api.with_options(base_url=str(api.base_url).removesuffix("v1/"))
    tokens = root.post("/tokenize", body={"model": model, "prompt": "hello there"}, cast_to=object)
    return [tokens, root.post("/detokenize", body={"model": model, "tokens": tokens["tokens"]}, cast_to=object)]


CALLS = [
    chat, chat_stream, chat_stream_with_usage, chat_stream_bytes, completions, completions_stream, tools, tools_stream,
    tools_stream_helper, tool_result, structured, structured_stream, responses, responses_stream, responses_structured,
    responses_tools_stream, embeddings, transcription, transcription_stream, translation, speech, images,
    moderations, rerank, score, tokenize,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_answer_is_the_engines(call, direct, through, engine):
    expected = call(client(direct), direct.model)
    before = engine.counters()["total"]
    assert call(client(through), through.model) == expected
    assert engine.counters()["total"] > before


@pytest.mark.parametrize("call", [chat, chat_stream, responses_stream, transcription], ids=lambda call: call.__name__)
def test_a_base_url_that_names_the_model_is_as_good(call, direct, through):
    passthrough = Side("passthrough", f"{through.url}/engines/{through.model}", through.model)
    assert call(client(passthrough), passthrough.model) == call(client(direct), direct.model)


def test_a_bad_request_is_refused_in_the_engines_words(direct, through):
    def refused(side):
        with pytest.raises(openai.BadRequestError) as raised:
            client(side).chat.completions.create(model=side.model, messages=HELLO, max_tokens=0)
        return raised.value.status_code, raised.value.body

    assert refused(through) == refused(direct)


def test_an_unknown_model_is_not_found(side):
    for call in [chat, chat_stream, responses_stream, embeddings, transcription, speech]:
        with pytest.raises(openai.NotFoundError):
            call(client(side), "no-such-model")


def test_a_key_that_is_too_much_is_no_error(side):
    assert chat(client(side).with_options(api_key="other"), side.model)


@pytest.mark.parametrize("call", [chat, chat_stream, responses_stream, transcription], ids=lambda call: call.__name__)
def test_an_engine_that_fails_once_is_asked_again(call, side, engine):
    before = engine.counters()
    engine.fault(fail_next=1)
    assert call(client(side), side.model)
    assert engine.counters()["total"] == before["total"] + 2
    engine.fault(fail_next=1)
    with pytest.raises(openai.InternalServerError) as raised:
        call(client(side, max_retries=0), side.model)
    assert raised.value.status_code == 503


def open_chat(api, model):
    return api.chat.completions.create(model=model, messages=HELLO, max_tokens=5000, stream=True)


def open_responses(api, model):
    return api.responses.create(model=model, input="hi", max_output_tokens=5000, stream=True)


async def read(side, stream):
    async with openai.AsyncOpenAI(base_url=side.url + "/v1", api_key="any") as api:
        chunks = await api.chat.completions.create(model=side.model, messages=HELLO, stream=stream)
        return dump(*[chunk async for chunk in chunks]) if stream else dump(chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_the_async_client_gets_the_engines_answer(stream, direct, through):
    assert asyncio.run(read(through, stream)) == asyncio.run(read(direct, stream))


def test_a_task_that_is_cancelled_stops_the_engine_within_a_second(side, engine):
    async def cancelled():
        async with openai.AsyncOpenAI(base_url=side.url + "/v1", api_key="any") as api:
            ask = api.chat.completions.create(model=side.model, messages=HELLO, max_tokens=5000)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask, 0.3)
            await asyncio.to_thread(until, lambda: engine.busy() == 0, 1, "the engine stopped")

    asyncio.run(cancelled())


@pytest.mark.parametrize("begin", [open_chat, open_responses], ids=["chat", "responses"])
def test_a_stream_that_is_closed_stops_the_engine_within_a_second(begin, side, engine):
    stream = begin(client(side), side.model)
    for _ in range(8):
        next(stream)
    assert engine.busy() == 1
    stream.close()
    until(lambda: engine.busy() == 0, 1, "the engine stopped")


def test_a_client_that_gives_up_waiting_stops_the_engine_within_a_second(side, engine):
    with pytest.raises(openai.APITimeoutError):
        client(side, max_retries=0, timeout=0.5).chat.completions.create(
            model=side.model, messages=HELLO, max_tokens=5000
        )
    until(lambda: engine.busy() == 0, 1, "the engine stopped")


@pytest.mark.parametrize("call", [chat_stream, responses_stream, tools_stream], ids=lambda call: call.__name__)
@pytest.mark.parametrize("fault", ["cut_mid_stream", "fin_mid_stream"])
def test_a_stream_that_the_engine_breaks_off_is_an_error_and_no_end(call, fault, through, engine):
    engine.fault(**{fault: 6})
    try:
        with pytest.raises(openai.APIError) as raised:
            call(client(through), through.model)
    finally:
        engine.fault(**{fault: None})
    assert not isinstance(raised.value, openai.APIStatusError), "it broke off before its head"
