"""What the k6 scenarios say, read by node in place of k6, which takes an hour's build of another project."""

import json
import os
import pathlib
import subprocess

import pytest

K6 = pathlib.Path(__file__).parents[3] / "loadtests" / "k6"

# As k6 with the option `throw`: a request that is given up ends with an error.
MODULES = {
    "package.json": '{"type": "module", "exports": {".": "./index.js", "./http": "./http.js"}}',
    "http.js": "export default { post() { throw new Error('request timeout'); } };",
    "index.js": """
        export const check = (value, all) => Object.values(all).every((holds) => holds(value));
        export const fail = (why) => { throw new Error(why); };
        export const sleep = () => {};
    """,
}
READER = """
    globalThis.__ENV = JSON.parse(process.env.SCENARIO);
    const common = await import('./common.js');
    const { options } = await import('./aborts.js');
    const { gateway, admin } = common;
    console.log(JSON.stringify({ gateway, admin, throws: options.throw, left: common.leave('m', 1, 5) }));
"""


@pytest.fixture
def scenario(tmp_path):
    """Gives what the scenario `aborts` and what it shares with the others come to, in this environment."""
    modules = tmp_path / "node_modules" / "k6"
    modules.mkdir(parents=True)
    for name, text in MODULES.items():
        (modules / name).write_text(text)
    for name in ["common.js", "aborts.js"]:
        (tmp_path / name).write_text((K6 / name).read_text())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "reader.js").write_text(READER)

    def read(**environment):
        node = os.environ.get("ROUSE_NODE", "node")
        environment = {**os.environ, "SCENARIO": json.dumps(environment)}
        return subprocess.run(
            [node, "reader.js"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )

    return read


def test_a_slash_behind_an_address_is_none_of_another_machine(scenario):
    for written in ["http://127.0.0.1:8080", "http://127.0.0.1:8080/", "https://localhost//", "http://[::1]:80/"]:
        told = json.loads(scenario(GATEWAY=written, ADMIN=written).stdout)
        assert told["gateway"] == told["admin"] == written.rstrip("/")
    for written in ["http://example.org/", "http://127.0.0.1.example.org", "http://localhost@example.org"]:
        for name in ["GATEWAY", "ADMIN"]:
            refused = scenario(**{name: written})
            assert refused.returncode != 0
            assert f"{name} is {written}: these scenarios load this machine only" in refused.stderr


def test_a_stream_that_is_left_is_no_failure_and_is_not_warned_of(scenario):
    told = json.loads(scenario().stdout)
    assert told["left"] is True
    # Without it k6 warns of each request that it gives up.
    assert told["throws"] is True
