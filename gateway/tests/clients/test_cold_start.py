"""Every client across a cold start of 30 s, all at once: with its default settings, and as a stream whose client gives
up after 20 s in which not a byte came. Starts that fail are the clients' retries before the head, and their exceptions
after it."""

import contextlib
import time

import anthropic
import httpx2
import openai
import pytest

import test_anthropic
import test_langchain
import test_openai
from support import MODEL, SERVED, Side, Thrown, running, simulated, together

COLD = 30
# After its own start an engine is looked at, and then all of them stream at once.
DONE_WITHIN = COLD + 30
IDLE = 20

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


def wholes(side, node):
    """Name to call, one for each client and call that is no stream, by default settings."""
    openais, anthropics = test_openai.client(side), test_anthropic.client(side)
    return {
        **{f"openai {call.__name__}": lambda call=call: call(openais, side.model) for call in whole},
        **{f"anthropic {call.__name__}": lambda call=call: call(anthropics, side.model) for call in whole_of_anthropic},
        **{f"langchain {call.__name__}": lambda call=call: call(side) for call in whole_of_langchain},
        **{f"node {call}": lambda call=call: node.call(call, side, within=90) for call in whole_of_node},
    }


def streams(side, node, idle=None, **options):
    """The same of streams; with `idle`, for clients that give up after so many seconds without a byte."""
    timeout = {"timeout": openai.Timeout(600, connect=5, read=idle)} if idle else {}
    openais = test_openai.client(side, **timeout, **options)
    anthropics = test_anthropic.client(side, **timeout, **options)
    patience = {"idle": idle * 1000} if idle else {}
    retries = {"maxRetries": options["max_retries"]} if options else {}
    name = f"with {idle} s of patience" if idle else "by default"
    return {
        **{f"openai {call.__name__} {name}": lambda call=call: call(openais, side.model) for call in of_openai},
        **{
            f"anthropic {call.__name__} {name}": lambda call=call: call(anthropics, side.model)
            for call in of_anthropic
        },
        **{
            f"langchain {call.__name__} {name}": lambda call=call: call(side, **timeout, **options)
            for call in of_langchain
        },
        **{
            f"node {call} {name}": lambda call=call: node.call(call, side, within=90, **patience, **retries)
            for call in of_node
        },
    }


@pytest.fixture
def gateway(tmp_path):
    with contextlib.ExitStack() as started:
        yield lambda *models, **settings: started.enter_context(running(tmp_path, *models, **settings))


def test_every_client_outlasts_a_cold_start_of_30_s(gateway, node):
    cold = gateway(simulated(MODEL, "--start-time", f"{COLD}s", served=SERVED))
    begun = time.monotonic()
    answers = together(everything(Side("through", cold.api, MODEL), node))
    took = time.monotonic() - begun
    print(f"{len(answers)} calls of four clients, cold to the last byte: {took:.1f} s")
    assert COLD <= took < DONE_WITHIN

    engine = cold.engine(MODEL)
    # The gateway names each request that it passes on, and not its own: nobody gave up and asked again.
    asked = [one for one in engine.counters()["arrivals"] if one["request_id"]]
    twice = ["langchain structured", "langchain embeddings"]
    assert len(asked) == len(answers) + len(twice)
    assert not cold.metrics("rouse_client_disconnects_total")

    expected = together(everything(Side("direct", engine.url, SERVED), node))
    assert {name: answer for name, answer in answers.items() if answer != expected[name]} == {}


def everything(side, node):
    return wholes(side, node) | streams(side, node) | streams(side, node, IDLE)


@pytest.mark.parametrize("heartbeat", ["300ms", "10m"])
def test_it_is_the_heartbeats_that_keep_an_impatient_client(heartbeat, gateway, node, tmp_path):
    """What the test above proves, it proves by them: the same clients without them give up."""
    slow = simulated(MODEL, "--start-time", "3s", served=SERVED)
    if heartbeat == "10m":
        slow, start = waiting(tmp_path)
    rouse = gateway(slow, stream={"grace": "100ms", "heartbeat": heartbeat})
    ask = streams(Side("through", rouse.api, MODEL), node, 1, max_retries=0)
    if heartbeat == "300ms":
        assert all(together(ask).values())
    else:
        assert all("time" in repr(error).lower() or "terminated" in repr(error) for error in failures(ask).values())
        start()
        rouse.wake(MODEL)


def waiting(folder):
    """A model whose engine starts when it is told to, and what tells it: however late a client comes, it has to wait."""
    told = folder / "start"
    return simulated(MODEL, served=SERVED, shell=f"until [ -e {told} ]; do sleep 0.1; done"), told.touch


def failures(calls):
    """What each of the calls throws; it is an error when one does not."""
    def fails(call):
        with pytest.raises((openai.APIError, anthropic.APIError, httpx2.TransportError, Thrown)) as raised:
            call()
        return raised.value

    return together({name: lambda call=call: fails(call) for name, call in calls.items()})


def test_heartbeats_at_every_turn_change_no_stream(gateway, node):
    quick = {"grace": "10ms", "heartbeat": "20ms"}
    cold = gateway(simulated(MODEL, "--start-time", "1500ms", served=SERVED), stream=quick)
    answers = together(streams(Side("through", cold.api, MODEL), node))
    direct = Side("direct", cold.engine(MODEL).url, SERVED)
    assert answers == together(streams(direct, node))


def test_clients_that_leave_while_it_starts_leave_nothing_behind_but_a_model_that_is_awake(gateway, node, tmp_path):
    model, start = waiting(tmp_path)
    rouse = gateway(model)
    side = Side("through", rouse.api, MODEL)
    quick = {"timeout": 1, "max_retries": 0}
    failures({
        "openai": lambda: test_openai.chat(test_openai.client(side, **quick), MODEL),
        "openai, a stream": lambda: test_openai.chat_stream(test_openai.client(side, **quick), MODEL),
        "anthropic": lambda: test_anthropic.messages(test_anthropic.client(side, **quick), MODEL),
        "langchain": lambda: test_langchain.invoke(side, **quick),
        "node": lambda: node.call("chat", side, timeout=1000, maxRetries=0),
    })  # fmt: skip
    start()
    rouse.until_state(MODEL, "awake")
    assert rouse.leases() == 0
    assert not [one for one in rouse.engine(MODEL).counters()["arrivals"] if one["request_id"]]
    left = rouse.metrics("rouse_client_disconnects_total")
    assert sum(value for labels, value in left.items() if 'phase="parked"' in labels) == sum(left.values()) == 5


CLIENTS = ["openai", "anthropic", "langchain", "node"]


def flaky(name, folder, starts):
    """A model whose first `starts` starts fail, the last of them with a word to nobody."""
    tried = folder / name
    shell = f"echo >> {tried}; [ $(wc -l < {tried}) -gt {starts} ] || exit 3"
    return simulated(name, served=SERVED, shell=shell)


def test_a_start_that_fails_is_retried_by_every_client(gateway, node, tmp_path):
    # The gateway itself starts an engine again, once and at once.
    rouse = gateway(*(flaky(name, tmp_path, 2) for name in [*CLIENTS, "refused"]))
    with pytest.raises(openai.InternalServerError) as raised:
        test_openai.chat(test_openai.client(Side("through", rouse.api, "refused"), max_retries=0), "refused")
    assert raised.value.code == "model_not_ready"
    assert raised.value.response.headers["x-should-retry"] == "true"
    assert int(raised.value.response.headers["retry-after"]) >= 1

    sides = {name: Side("through", rouse.api, name) for name in CLIENTS}
    together({
        "openai": lambda: test_openai.chat(test_openai.client(sides["openai"]), "openai"),
        "anthropic": lambda: test_anthropic.stream(test_anthropic.client(sides["anthropic"]), "anthropic"),
        "langchain": lambda: test_langchain.stream(sides["langchain"]),
        "node": lambda: node.call("chatStream", sides["node"]),
    })  # fmt: skip
    refusals = " ".join(labels for labels in rouse.metrics("rouse_requests_total") if 'status="5xx"' in labels)
    for name in CLIENTS:
        assert f'model="{name}"' in refusals, f"{name} did not have to retry"


def test_a_start_that_fails_after_the_head_is_an_exception_in_every_client(gateway, node):
    """The status is out: all that is left is an event that the client makes an exception of."""
    never = simulated(MODEL, served=SERVED, shell="sleep 2; exit 3")
    rouse = gateway(never, stream={"grace": "10ms", "heartbeat": "50ms"})
    errors = failures(streams(Side("through", rouse.api, MODEL), node))
    assert {name: str(error) for name, error in errors.items() if MODEL not in str(error)} == {}
    # Anthropic's client makes an exception of the status 200; the others have none.
    before_head = {name: str(error) for name, error in errors.items() if status(error) not in (None, 200)}
    assert before_head == {}


def test_an_engines_refusal_after_the_head_is_an_exception_too(gateway, node):
    slow = simulated(MODEL, "--start-time", "1500ms", "--fault", "status=418", served=SERVED)
    # An engine whose readiness is proved by an answer would never be ready.
    slow["engine"]["task"] = "none"
    rouse = gateway(slow, stream={"grace": "10ms", "heartbeat": "50ms"})
    errors = failures(streams(Side("through", rouse.api, MODEL), node))
    assert {name: str(error) for name, error in errors.items() if "A fault was asked for" not in str(error)} == {}
    assert {name: str(error) for name, error in errors.items() if status(error) not in (None, 200)} == {}


def status(error):
    return getattr(error, "status", None) or getattr(error, "status_code", None)
