"""`langchain-openai`: the same calls to the engine and through the gateway."""

import langchain_core.tools
import langchain_openai
import openai
import pydantic
import pytest

from harness import until


class Trip(pydantic.BaseModel):
    """A trip."""

    city: str
    days: int


@langchain_core.tools.tool
def book(city: str, days: int) -> str:
    """Books a trip."""
    return f"{days} days in {city}"


def chat_model(side, **options):
    return langchain_openai.ChatOpenAI(base_url=side.url + "/v1", **{"model": side.model, "api_key": "any", **options})


def dump(*messages):
    """All but the ids of runs, which the client itself makes up."""
    made_up = {"id"}
    return [one.model_dump(exclude=made_up if str(one.id).startswith("lc_run") else None) for one in messages]


def invoke(side, **options):
    answer = chat_model(side, **options).invoke("Tell me a story.")
    assert answer.content and answer.usage_metadata["output_tokens"]
    return dump(answer)


def stream(side, **options):
    chunks = list(chat_model(side, **options).stream("Tell me a story."))
    assert len(chunks) > 10
    return dump(*chunks)


def stream_with_usage(side):
    chunks = list(chat_model(side, stream_usage=True).stream("Tell me a story."))
    assert any(chunk.usage_metadata for chunk in chunks)
    return dump(*chunks)


def over_responses(side):
    answer = chat_model(side, use_responses_api=True).invoke("Tell me a story.")
    assert answer.text
    return dump(answer)


def stream_over_responses(side, **options):
    chunks = list(chat_model(side, use_responses_api=True, **options).stream("Tell me a story."))
    assert "".join(chunk.text for chunk in chunks)
    return dump(*chunks)


def tools(side):
    answer = chat_model(side).bind_tools([book]).invoke("Book me a trip.")
    assert book.invoke(answer.tool_calls[0]["args"])
    return dump(answer)


def tools_stream(side, **options):
    chunks = list(chat_model(side, **options).bind_tools([book]).stream("Book me a trip."))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert book.invoke(whole.tool_calls[0]["args"])
    return dump(*chunks)


def structured(side, **options):
    trips = [
        chat_model(side, **options).with_structured_output(Trip, method=method).invoke("Book me a trip.")
        for method in ["json_schema", "function_calling"]
    ]
    assert all(isinstance(trip, Trip) for trip in trips)
    return [trip.model_dump() for trip in trips]


def embeddings(side, **options):
    # Token ids are counted with a table that is fetched from elsewhere: off, as for any server that is not OpenAI's.
    model = langchain_openai.OpenAIEmbeddings(
        base_url=side.url + "/v1", api_key="any", model=side.model, check_embedding_ctx_length=False, **options
    )
    return [model.embed_query("a"), *model.embed_documents(["a", "b"])]


CALLS = [
    invoke, stream, stream_with_usage, over_responses, stream_over_responses, tools, tools_stream, structured,
    embeddings,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_answer_is_the_engines(call, direct, through, engine):
    expected = call(direct)
    before = engine.counters()["total"]
    assert call(through) == expected
    assert engine.counters()["total"] > before


def test_errors_are_those_of_the_client_beneath(side):
    with pytest.raises(openai.BadRequestError):
        chat_model(side, max_tokens=0).invoke("hi")
    with pytest.raises(openai.NotFoundError):
        chat_model(side, model="no-such-model").invoke("hi")


def test_an_engine_that_fails_once_is_asked_again(side, engine):
    for call in [invoke, stream]:
        before = engine.counters()["total"]
        engine.fault(fail_next=1)
        assert call(side)
        assert engine.counters()["total"] == before + 2


def test_a_stream_that_is_left_stops_the_engine_within_a_second(side, engine):
    chunks = chat_model(side, max_tokens=5000).stream("Tell me a story.")
    for _ in range(8):
        next(chunks)
    assert engine.busy() == 1
    chunks.close()
    until(lambda: engine.busy() == 0, 1, "the engine stopped")
