"""Keys as each client sends them, and the exception that it makes of each refusal."""

import hashlib

import anthropic
import openai
import pytest

import test_anthropic
import test_langchain
import test_openai
from support import MODEL, SERVED, Side, Thrown, running, simulated

KEYS = {"good": {}, "other-models": {"models": ["other"]}}
KEYS |= {f"once-{name}": {"requestsPerMinute": 1} for name in ["openai", "anthropic", "langchain", "node"]}


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    keys = [{"name": key, "sha256": hashlib.sha256(key.encode()).hexdigest(), **limits} for key, limits in KEYS.items()]
    with running(tmp_path_factory.mktemp("keys"), simulated(MODEL, served=SERVED), keys=keys) as gateway:
        gateway.wake(MODEL)
        yield Side("through", gateway.api, MODEL)


def ask(client, key, side, node):
    """One request with this key and without retries."""
    options = {"api_key": key, "max_retries": 0}
    match client:
        case "openai":
            return test_openai.chat(test_openai.client(side).with_options(**options), side.model)
        case "anthropic":
            return test_anthropic.messages(test_anthropic.client(side).with_options(**options), side.model)
        case "langchain":
            return test_langchain.invoke(side, **options)
        case "node":
            return node.call("chat", side, apiKey=key, maxRetries=0)


def refused(client, key, side, node):
    """Status and class of the refusal; langchain has its own, which are its users' to catch by openai's names."""
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError, Thrown)) as raised:
        ask(client, key, side, node)
    error = raised.value
    if client == "node":
        return error.status, error.name
    stock = [one.__name__ for one in type(error).__mro__ if one.__module__.startswith(("openai", "anthropic"))]
    return error.status_code, stock[0]


@pytest.mark.parametrize("client", ["openai", "anthropic", "langchain", "node"])
def test_every_client_sends_its_key_and_names_each_refusal(client, through, node):
    assert ask(client, "good", through, node)
    assert refused(client, "unknown", through, node) == (401, "AuthenticationError")
    assert refused(client, "other-models", through, node) == (403, "PermissionDeniedError")
    assert ask(client, f"once-{client}", through, node)
    assert refused(client, f"once-{client}", through, node) == (429, "RateLimitError")


def test_anthropics_client_reads_the_type_of_each_refusal(through):
    def kind(key):
        with pytest.raises(anthropic.APIStatusError) as raised:
            test_anthropic.messages(test_anthropic.client(through).with_options(api_key=key), MODEL)
        return raised.value.type

    assert kind("unknown") == "authentication_error"
    assert kind("other-models") == "permission_error"
