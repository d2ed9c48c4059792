"""What schemathesis cannot know: which models there are, and that a log that is followed has no end."""

import json
import os
import random

import schemathesis

MODELS = json.loads(os.environ["ROUSE_MODELS"])
# Of its own, so that the same seed makes the same requests.
CHANCE = random.Random(2026)


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    # Made-up names alone would find nothing but 404.
    if path_parameters and "model" in path_parameters and CHANCE.random() < 0.7:
        path_parameters["model"] = CHANCE.choice(MODELS)
    return path_parameters


@schemathesis.hook
def before_call(context, case, kwargs):
    if (case.query or {}).get("follow") in ("true", "1"):
        case.query["follow"] = "false"
