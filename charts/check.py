"""Checks what the chart renders: charts/check calls this with the chart's folder and the folder of rendered files."""

import json
import pathlib
import sys

import yaml

chart, rendered = map(pathlib.Path, sys.argv[1:])
failures = []
# The loader in C, where PyYAML has it, is ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check(holds, message):
    if not holds:
        failures.append(message)


def load(text):
    return yaml.load(text, LOADER)


def objects(file):
    return [each for each in yaml.load_all(file.read_text(), LOADER) if each]


def values(at, schema, path="values.yaml"):
    """Every value has a schema, and no schema is without a value."""
    if isinstance(at, dict) and schema.get("additionalProperties") is False:
        optional = {"global"} if path == "values.yaml" else {"limits", "claims"}
        known = set(schema["properties"]) - optional
        check(set(at) - optional == known, f"{path} and its schema differ: {set(at) ^ known}")
        for key in set(at) & known:
            values(at[key], schema["properties"][key], f"{path}: {key}")


def rules(role):
    """The rights of a role, one by one."""
    return {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [None])
    }


def check_objects(name, all):
    """One set of rendered objects is whole: what refers to another object of the release finds it."""
    keys = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in all]
    check(len(keys) == len(set(keys)), f"{name}: an object is there twice")
    found = {(kind, object_name): each for (kind, _, object_name), each in zip(keys, all)}
    accounts = {key[1] for key in found if key[0] == "ServiceAccount"}
    for each in all:
        at = f"{name}: {each['kind']} {each['metadata']['name']}"
        labels = each["metadata"]["labels"]
        check(labels.get("app.kubernetes.io/part-of") == "rouse", f"{at} lacks the labels of the chart")
        if "roleRef" in each:
            reference = each["roleRef"]
            check((reference["kind"], reference["name"]) in found, f"{at} binds a role that is not there")
            for subject in each["subjects"]:
                own = subject["name"] in accounts or name == "one-gateway"
                check(own and subject["namespace"] == "rouse", f"{at} binds {subject}")
        if each["kind"] in ("Role", "ClusterRole"):
            kinds = ("RoleBinding", "ClusterRoleBinding")
            bound = any(
                one["kind"] in kinds and one["roleRef"]["name"] == each["metadata"]["name"] for one in all
            )
            check(bound, f"{at} is bound by nothing")
        if each["kind"] == "ValidatingAdmissionPolicyBinding":
            policy = ("ValidatingAdmissionPolicy", each["spec"]["policyName"])
            check(policy in found, f"{at} binds a policy that is not there")
        pod = each["spec"]["template"]["spec"] if each["kind"] in ("Deployment", "DaemonSet") else None
        if pod:
            account = pod["serviceAccountName"]
            check(account in accounts or name == "one-gateway", f"{at} has no account {account}")
            mounts = {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]}
            check(mounts == {volume["name"] for volume in pod["volumes"]}, f"{at} mounts {mounts}")
            selector = each["spec"]["selector"]["matchLabels"].items()
            check(selector <= each["spec"]["template"]["metadata"]["labels"].items(), f"{at} selects others")
    for each in all:
        text = each.get("data", {}).get("rouse.yaml")
        if text:
            check(isinstance(load(text), dict), f"{name}: the configuration is no mapping")


def check_saturation(name, all):
    """Gateways watch the thresholds of saturation exactly if they have the right to: without it, each list fails."""
    may = any(each["kind"] == "Role" and each["metadata"]["name"].endswith("-gateway-saturation") for each in all)
    texts = [each["data"]["rouse.yaml"] for each in all if "rouse.yaml" in each.get("data", {})]
    for text in texts:
        watches = load(text)["kubernetes"]["saturation"]["enabled"]
        check(watches == may, f"{name}: saturation.enabled is {watches} for gateways, and their right is {may}")
    check(texts, f"{name}: there is no configuration")


def check_definitions(all):
    """The definitions are those of the files, but for what helm needs."""
    written = [each for file in (chart / "definitions").iterdir() for each in objects(file)]
    files = {each["metadata"]["name"]: each for each in written}
    made = {each["metadata"]["name"]: each for each in all if each["kind"] == "CustomResourceDefinition"}
    check(files.keys() == made.keys(), f"definitions: {files.keys() ^ made.keys()}")
    for name in files.keys() & made.keys():
        kept = made[name]["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        made[name]["metadata"].pop("labels")
        check(kept and made[name] == files[name], f"the definition {name} is not that of its file")


def check_everything(all):
    """With every part turned on, all rights of the files are there, and all alerts and dashboards."""
    made, files = set(), set()
    for each in all:
        if each["kind"] in ("Role", "ClusterRole"):
            made |= rules(each)
    for file in (chart / "rbac").iterdir():
        for each in objects(file):
            if each["kind"] in ("Role", "ClusterRole"):
                files |= rules(each)
    check(made == files, f"rights: {made ^ files}")
    alerts = [file for file in (chart / "alerts").glob("*.yaml") if not file.name.endswith(".test.yaml")]
    groups = [group for file in sorted(alerts) for group in load(file.read_text())["groups"]]
    shipped = [each for each in all if each["kind"] == "PrometheusRule"][0]["spec"]["groups"]
    by_name = lambda group: group["name"]
    check(sorted(groups, key=by_name) == sorted(shipped, key=by_name), "the alerts are not those of the files")
    for file in (chart / "dashboards").iterdir():
        texts = [each["data"].get(f"rouse-{file.name}") for each in all if each["kind"] == "ConfigMap"]
        texts = [json.loads(text) for text in texts if text]
        check(texts == [json.loads(file.read_text())], f"the dashboard {file.name} is not that of its file")


def check_all_namespaces(all):
    """For every namespace the chart binds what rbac/all-namespaces.yaml binds, less the role of what is off."""
    bound = {
        each["metadata"]["name"]: each["roleRef"]["name"]
        for each in objects(chart / "rbac/all-namespaces.yaml")
        if each["metadata"]["name"] != "rouse-gateway-warmups"
    }
    made = {each["metadata"]["name"]: each["roleRef"]["name"] for each in all if each["kind"] == "ClusterRoleBinding"}
    made.pop("rouse-gateway")
    check(made == bound, f"in all namespaces: {made} and {bound}")


values(
    load((chart / "values.yaml").read_text()), json.loads((chart / "values.schema.json").read_text())
)
for file in sorted(rendered.glob("*.yaml")):
    check_objects(file.stem, objects(file))
    check_saturation(file.stem, objects(file))
check_definitions(objects(rendered / "defaults.yaml"))
check_everything(objects(rendered / "everything.yaml"))
check_all_namespaces(objects(rendered / "all-namespaces.yaml"))
for failure in failures:
    print(f"FAILED: {failure}", file=sys.stderr)
sys.exit(bool(failures))
