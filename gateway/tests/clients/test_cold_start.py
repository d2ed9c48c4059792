"""Every client across a cold start of 30 s, all at once: with its default settings, and as a stream whose client gives up
after 20 s in which not a byte came. A model that fails to start once is the clients' retry, not their error."""

import time

import openai
import pytest

import test_anthropic
import test_langchain
import test_openai
from support import MODEL, SERVED, Gateway, Side, simulated, together

COLD = 30
# After its own start an engine is looked at, and then all of them stream at once.
DONE_WITHIN = COLD + 15
IDLE = openai.Timeout(600, connect=5, read=20)
IDLE_MS = 20_000

of_openai = [
    test_openai.chat_stream, test_openai.chat_stream_with_usage, test_openai.completions_stream,
    test_openai.tools_stream_helper, test_openai.structured_stream, test_openai.responses_stream,
    test_openai.responses_tools_stream, test_openai.transcription_stream,
]  # fmt: skip
of_anthropic = [test_anthropic.stream, test_anthropic.stream_helper, test_anthropic.tools_stream]
of_langchain = [test_langchain.stream, test_langchain.tools_stream, test_langchain.stream_over_responses]
of_node = ["chatStream", "toolsStreamHelper", "structuredStream", "responsesStream", "responsesToolsStream"]

whole = [
    test_openai.chat, test_openai.tools, test_openai.structured, test_openai.responses, test_openai.embeddings,
    test_openai.transcription, test_openai.speech,
]  # fmt: skip
whole_of_anthropic = [test_anthropic.messages, test_anthropic.tools, test_anthropic.count_tokens]
whole_of_langchain = [test_langchain.invoke, test_langchain.structured, test_langchain.embeddings]
whole_of_node = ["chat", "structured", "responses", "embeddings", "transcription"]


def cases(side, node):
    """Name to call, one for each client and call: streams twice, since defaults and impatience are two clients."""
    found = {}
    for options, how in [({}, "by default"), ({"timeout": IDLE}, "with 20 s of patience")]:
        for call in of_openai + (whole if not options else []):
            api = test_openai.client(side, **options)
            found[f"openai {call.__name__} {how}"] = lambda call=call, api=api: call(api, side.model)
        for call in of_anthropic + (whole_of_anthropic if not options else []):
            api = test_anthropic.client(side, **options)
            found[f"anthropic {call.__name__} {how}"] = lambda call=call, api=api: call(api, side.model)
        for call in of_langchain + (whole_of_langchain if not options else []):
            found[f"langchain {call.__name__} {how}"] = lambda call=call, options=options: call(side, **options)
        idle = {"idle": IDLE_MS} if options else {}
        for call in of_node + (whole_of_node if not options else []):
            found[f"node {call} {how}"] = lambda call=call, idle=idle: node.call(call, side, within=90, **idle)
    return found


@pytest.fixture
def gateway(tmp_path):
    started = []

    def start(*models, **settings):
        started.append(Gateway(tmp_path, *models, **settings))
        return started[-1]

    yield start
    for one in started:
        code = one.stop()
        print(one.tail())
        assert code == 0


def test_every_client_outlasts_a_cold_start_of_30_s(gateway, node):
    cold = gateway(simulated(MODEL, "--start-time", f"{COLD}s", served=SERVED))
    through = cases(Side("through", cold.api, MODEL), node)
    begun = time.monotonic()
    answers = together(through)
    took = time.monotonic() - begun
    print(f"{len(answers)} calls of four clients, cold to the last byte: {took:.1f} s")
    assert COLD <= took < DONE_WITHIN

    engine = cold.engine(MODEL)
    # The gateway names each request that it passes on, and not its own: nobody gave up and asked again.
    asked = [one for one in engine.counters()["arrivals"] if one["request_id"]]
    calls = sum(2 if "langchain structured" in name else 3 if "langchain embeddings" in name else 1 for name in through)
    assert len(asked) == calls
    assert not cold.metrics("rouse_client_disconnects_total")

    expected = together(cases(Side("direct", engine.url, SERVED), node))
    assert {name: answer for name, answer in answers.items() if answer != expected[name]} == {}


def test_a_model_whose_first_start_fails_is_asked_for_again(gateway, tmp_path):
    started = tmp_path / "started"
    shell = f"test -e {started} || {{ touch {started}; exit 3; }}"
    flaky = gateway(simulated(MODEL, served=SERVED, shell=shell))
    side = Side("through", flaky.api, MODEL)
    with pytest.raises(openai.InternalServerError) as raised:
        test_openai.chat(test_openai.client(side, max_retries=0), MODEL)
    assert raised.value.code == "model_not_ready"
    assert raised.value.response.headers["x-should-retry"] == "true"
    assert int(raised.value.response.headers["retry-after"]) >= 1
    assert test_openai.chat(test_openai.client(side), MODEL)
