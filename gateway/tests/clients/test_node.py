"""npm `openai`: the same calls to the engine and through the gateway, made by node.cjs."""

import pytest

from harness import until
from support import Thrown

CALLS = [
    "chat", "chatStream", "chatStreamWithUsage", "completionsStream", "tools", "toolsStream", "toolsStreamHelper",
    "structured", "structuredStream", "responses", "responsesStream", "responsesStructured", "responsesToolsStream",
    "embeddings", "transcription", "transcriptionStream", "speech", "images", "moderations",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_the_answer_is_the_engines(call, node, direct, through, engine):
    expected = node.call(call, direct)
    assert expected
    before = engine.counters()["total"]
    assert node.call(call, through) == expected
    assert engine.counters()["total"] > before


def test_a_bad_request_is_refused_in_the_engines_words(node, direct, through):
    def refused(side):
        with pytest.raises(Thrown) as thrown:
            node.call("badRequest", side)
        return thrown.value.name, thrown.value.status, thrown.value.error

    assert refused(through) == refused(direct)
    assert refused(through)[:2] == ("BadRequestError", 400)


def test_an_unknown_model_is_not_found(node, side):
    unknown = type(side)(side.name, side.url, "no-such-model")
    for call in ["chat", "chatStream", "responsesStream", "transcription"]:
        with pytest.raises(Thrown) as thrown:
            node.call(call, unknown)
        assert (thrown.value.name, thrown.value.status) == ("NotFoundError", 404), call


@pytest.mark.parametrize("call", ["chat", "chatStream", "responsesStream"])
def test_an_engine_that_fails_once_is_asked_again(call, node, side, engine):
    before = engine.counters()["total"]
    engine.fault(fail_next=1)
    assert node.call(call, side)
    assert engine.counters()["total"] == before + 2
    engine.fault(fail_next=1)
    with pytest.raises(Thrown) as thrown:
        node.call(call, side, maxRetries=0)
    assert (thrown.value.name, thrown.value.status) == ("InternalServerError", 503)


@pytest.mark.parametrize("call", ["leaveChat", "leaveResponses", "abort"])
def test_a_stream_that_is_left_stops_the_engine_within_a_second(call, node, side, engine):
    assert node.call(call, side) == 8
    until(lambda: engine.busy() == 0, 1, "the engine stopped")


def test_a_client_that_gives_up_waiting_stops_the_engine_within_a_second(node, side, engine):
    with pytest.raises(Thrown) as thrown:
        node.call("long", side, timeout=500, maxRetries=0)
    assert thrown.value.name == "APIConnectionTimeoutError"
    until(lambda: engine.busy() == 0, 1, "the engine stopped")


@pytest.mark.parametrize("call", ["chatStream", "responsesStream", "toolsStream"])
@pytest.mark.parametrize("fault", ["cut_mid_stream", "fin_mid_stream"])
def test_a_stream_that_the_engine_breaks_off_is_an_error_and_no_end(call, fault, node, through, engine):
    engine.fault(**{fault: 6})
    try:
        with pytest.raises(Thrown) as thrown:
            node.call(call, through)
    finally:
        engine.fault(**{fault: None})
    assert thrown.value.name != "Error", "the stream looked whole"
    assert thrown.value.status is None, "it broke off before its head"
