"""One gateway for all tests that need no cold start; what is left in its engine after a test fails that test."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))

from harness import until
from support import MODEL, SERVED, Node, Side, running, simulated


def pytest_configure(config):
    # OpenAI would have translations go; engines have them still.
    config.addinivalue_line("filterwarnings", "ignore:deprecated:DeprecationWarning")


@pytest.fixture(scope="session")
def rouse(tmp_path_factory):
    with running(tmp_path_factory.mktemp("gateway"), simulated(MODEL, served=SERVED)) as gateway:
        gateway.wake(MODEL)
        yield gateway


@pytest.fixture(scope="session")
def direct(rouse):
    return Side("direct", rouse.engine(MODEL).url, SERVED)


@pytest.fixture(scope="session")
def through(rouse):
    return Side("through", rouse.api, MODEL)


@pytest.fixture(params=["direct", "through"])
def side(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def engine(rouse):
    """The engine under the gateway. Faults that a test sets are its own to clear; requests must be gone after it."""
    engine = rouse.engine(MODEL)
    yield engine
    until(lambda: engine.busy() == 0 and rouse.leases() == 0, 2, "nothing is left of any request")


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    with (tmp_path_factory.mktemp("node") / "log").open("w+") as log:
        node = Node(log)
        yield node
        node.stop()
        log.seek(0)
        print(log.read())
