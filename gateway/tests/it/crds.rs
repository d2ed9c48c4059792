//! The chart's definitions and their page in the docs match the types.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use rouse::{pairing::ids::ProviderMode, units::Millis};
use rouse_controllers::{
    convert::{ConversionPolicy, convert, device_configuration, warmup},
    crd,
    event_content::EventReason,
};
use serde_json::Value;

use crate::support::read;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn schema(crd: &CustomResourceDefinition) -> &JSONSchemaProps {
    crd.spec.versions[0].schema.as_ref().unwrap().open_api_v3_schema.as_ref().unwrap()
}

/// One field, by its path: `spec.variants[].name`, `status.models.*.waiting`.
struct Field<'a> {
    path: String,
    schema: &'a JSONSchemaProps,
}

fn fields(crd: &CustomResourceDefinition) -> Vec<Field<'_>> {
    let mut found = Vec::new();
    walk("", schema(crd), &mut found);
    found
}

fn walk<'a>(path: &str, schema: &'a JSONSchemaProps, into: &mut Vec<Field<'a>>) {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    for (name, schema) in schema.properties.iter().flatten() {
        into.push(Field { path: below(name), schema });
        walk(&below(name), schema, into);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
        walk(&format!("{path}[]"), items, into);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &schema.additional_properties {
        walk(&format!("{path}.*"), values, into);
    }
}

#[test]
fn the_charts_definitions_are_those_of_the_types() {
    let dir = root().join("charts/rouse/definitions");
    let mut files = BTreeSet::new();
    for document in crd::documents().unwrap() {
        let file = dir.join(&document.file);
        assert!(
            file.exists() && read(&file) == document.text,
            "{} is not what the types say: run `cargo run -p rouse-gateway -- crds --dir charts/rouse/definitions`",
            file.display()
        );
        files.insert(document.file);
    }
    let there =
        std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(there.collect::<BTreeSet<_>>(), files, "a file that nothing is said of");
}

/// Our definitions, and the foreign definitions that the command prints on request.
fn printed() -> Vec<CustomResourceDefinition> {
    crd::all().into_iter().chain(crd::fma::all()).collect()
}

#[test]
fn the_command_prints_one_document_for_each_kind() {
    let (ours, others) = (crd::documents().unwrap(), crd::fma::documents().unwrap());
    assert_eq!((ours.len(), others.len()), (7, 3));
    for (flags, documents) in [(&["crds"][..], ours.clone()), (&["crds", "--fma"], [ours, others].concat())] {
        let output = Command::new(env!("CARGO_BIN_EXE_rouse-gateway")).args(flags).output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        let texts: Vec<_> = text.split("---\n").skip(1).collect();
        assert_eq!(texts, documents.iter().map(|document| &document.text).collect::<Vec<_>>());
        for (text, definition) in texts.iter().zip(printed()) {
            let parsed: Value = serde_saphyr::from_str(text).unwrap();
            assert_eq!(parsed, serde_json::to_value(definition).unwrap(), "YAML says something else");
        }
    }
}

#[test]
fn the_command_prints_the_same_definitions_as_one_list_in_json() {
    let run = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-gateway"));
        command.arg("crds").args(flags).output().unwrap()
    };
    let ours = crd::all().into_iter().collect::<Vec<_>>();
    for (flags, definitions) in [(&["--json"][..], ours), (&["--json", "--fma"], printed())] {
        let output = run(flags);
        assert!(output.status.success());
        let list: Value = serde_json::from_slice(&output.stdout).unwrap();
        let items = serde_json::to_value(definitions).unwrap();
        assert_eq!(list, serde_json::json!({"apiVersion": "v1", "kind": "List", "items": items}));
    }
    let dir = tempfile::tempdir().unwrap();
    let both = run(&["--json", "--dir", dir.path().to_str().unwrap()]);
    assert_eq!(both.status.code(), Some(64), "one list is not one file for each kind");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_kinds_of_others_have_their_names() {
    let named = crd::fma::all().map(|crd| {
        let names = &crd.spec.names;
        let version = &crd.spec.versions[0].name;
        format!(
            "{}/{version} {} {}",
            crd.spec.group,
            names.plural,
            names.short_names.as_ref().unwrap().join(" ")
        )
    });
    assert_eq!(
        named,
        [
            "fma.llm-d.ai/v1alpha1 inferenceserverconfigs isc",
            "fma.llm-d.ai/v1alpha1 launcherconfigs lcfg",
            "fma.llm-d.ai/v1alpha1 launcherpopulationpolicies lpp",
        ]
    );
    let definitions = crd::fma::all();
    let counts = fields(&definitions[2]).into_iter().find(|field| field.path == "spec.countForLauncher");
    // An object must have here, too, each field that the public project's own definitions require.
    let asked: BTreeSet<String> =
        definitions.iter().flat_map(required).filter(|path| !path.contains("status")).collect();
    let public = [
        "spec",
        "spec.modelServerConfig",
        "spec.modelServerConfig.port",
        "spec.launcherConfigName",
        "spec.maxInstances",
        "spec.podTemplate.spec.containers",
        "spec.podTemplate.spec.containers[].name",
        "spec.enhancedNodeSelector",
        "spec.enhancedNodeSelector.labelSelector",
        "spec.enhancedNodeSelector.labelSelector.matchExpressions[].key",
        "spec.enhancedNodeSelector.labelSelector.matchExpressions[].operator",
        "spec.countForLauncher",
        "spec.countForLauncher[].launcherConfigName",
        "spec.countForLauncher[].launcherCount",
    ];
    assert_eq!(asked, public.map(str::to_owned).into());
    // The definitions set no defaults, and they accept only quantities as bounds.
    let all = || definitions.iter().flat_map(fields);
    assert!(all().all(|field| field.schema.default.is_none()));
    for bound in ["min", "max"] {
        let path = format!("spec.enhancedNodeSelector.allocatableResources.*.{bound}");
        assert!(all().any(|field| field.path == path && field.schema.pattern.is_some()), "{path}");
    }
    let bounds = |path: &str| {
        let field = all().find(|field| field.path == path).unwrap();
        (field.schema.minimum, field.schema.maximum)
    };
    assert_eq!(bounds("spec.modelServerConfig.port"), (Some(1.0), Some(65535.0)));
    assert_eq!(bounds("spec.maxInstances"), (Some(1.0), None));
    // An API server accepts each name once.
    let keys = &counts.unwrap().schema.x_kubernetes_list_map_keys;
    assert_eq!(*keys, Some(vec!["launcherConfigName".to_owned()]));
}

#[test]
fn an_api_server_can_take_the_definitions() {
    for definition in printed() {
        let name = definition.metadata.name.clone().unwrap();
        // `kubectl apply` keeps the object in an annotation, and annotations may have 256 KiB.
        let size = serde_json::to_string(&definition).unwrap().len();
        assert!(size < 200 << 10, "{name}: {size} bytes");
        assert!(definition.spec.versions[0].subresources.as_ref().unwrap().status.is_some(), "{name}");
        let text = serde_json::to_string(&definition).unwrap();
        for word in ["\"nullable\"", "\"$ref\"", "\"uint", "\"anyOf\"", "\"oneOf\"", "\"allOf\""] {
            assert!(!text.contains(word), "{name} has {word}");
        }
        for Field { path, schema } in fields(&definition) {
            assert!(
                schema.description.as_ref().is_some_and(|text| text.len() > 5),
                "{name}: {path} is not described"
            );
            let named = |value: &JSON| value.0.is_string();
            assert!(
                schema.enum_.iter().flatten().all(named),
                "{name}: {path} may be something else than a text"
            );
            let int_or_string = schema.x_kubernetes_int_or_string == Some(true);
            assert!(schema.type_.is_some() != int_or_string, "{name}: {path} has no type, or two");
        }
    }
}

#[test]
fn names_and_columns_are_those_that_people_type_and_look_for() {
    let named: Vec<_> = crd::all()
        .into_iter()
        .map(|crd| {
            let names = crd.spec.names;
            let columns = crd.spec.versions[0].additional_printer_columns.clone().unwrap();
            let columns: Vec<_> = columns
                .iter()
                .filter(|column| column.priority.unwrap_or_default() == 0)
                .map(|column| column.name.clone())
                .collect();
            format!(
                "{} {} {}: {}",
                names.kind,
                names.short_names.unwrap().join(" "),
                crd.spec.scope,
                columns.join(", ")
            )
        })
        .collect();
    assert_eq!(
        named,
        [
            "InferenceModel im Namespaced: Model, Ready, Status, Replicas, Memory, Age",
            "AcceleratorPool apool Cluster: Ready, Nodes, Accelerators, Total, Allocated, Available, Age",
            "AcceleratorNode anode Cluster: Pool, Type, Accelerators, Healthy, Total, Reserved, Age",
            "GatewayReplica gwr Namespaced: Address, Waiting, In Flight, Age",
            "Warmup warm Namespaced: Phase, Desired, Active, Succeeded, Failed, Age",
            "DeviceConfiguration devcfg Cluster: Accepted, Capacity, Devices, Slots, Used, Age",
            "DeviceInstance devinst Cluster: Configuration, Shared, Capacity, Nodes, Age",
        ]
    );
}

#[test]
fn the_page_has_every_field_and_says_of_it_what_the_schema_says() {
    let page = read(&root().join("docs/kubernetes.md"));
    let (mut wanted, mut titles) = (String::new(), Vec::new());
    for definition in crd::all() {
        let title = format!("## {}", definition.spec.names.kind);
        wanted.push_str(&format!("{title}\n"));
        titles.push(title);
        let required = required(&definition);
        // The conditions are Kubernetes' own type.
        let own = |field: &Field<'_>| field.path.contains('.') && !field.path.contains("conditions[].");
        for Field { path, schema } in fields(&definition).into_iter().filter(own) {
            let default = schema.default.as_ref().map(|value| format!("`{}`", value.0));
            let default = default
                .unwrap_or_else(|| if required.contains(&path) { "required".into() } else { "none".into() });
            let text = schema.description.as_deref().unwrap_or_default().replace('|', "\\|");
            wanted.push_str(&format!("| `{path}` | {} | {default} | {text} |\n", kind(schema)));
        }
    }
    let found: String = page
        .lines()
        .filter(|line| line.starts_with("| `") || titles.iter().any(|title| title == line))
        .map(|line| format!("{line}\n"))
        .collect();
    assert!(
        found == wanted,
        "the tables of docs/kubernetes.md are not those of the schemas, which are:\n{wanted}"
    );
}

fn required(crd: &CustomResourceDefinition) -> BTreeSet<String> {
    fn collect(path: &str, schema: &JSONSchemaProps, into: &mut BTreeSet<String>) {
        let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        into.extend(schema.required.iter().flatten().map(|name| below(name)));
        for (name, schema) in schema.properties.iter().flatten() {
            collect(&below(name), schema, into);
        }
        if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
            collect(&format!("{path}[]"), items, into);
        }
        if let Some(JSONSchemaPropsOrBool::Schema(values)) = &schema.additional_properties {
            collect(&format!("{path}.*"), values, into);
        }
    }
    let mut all = BTreeSet::new();
    collect("", schema(crd), &mut all);
    all
}

/// The type as the page spells it.
fn kind(schema: &JSONSchemaProps) -> String {
    if schema.x_kubernetes_int_or_string == Some(true) {
        // A number or one of some words: the pattern lists the words.
        let words =
            schema.pattern.as_ref().and_then(|pattern| pattern.strip_prefix("^(")?.strip_suffix(")$"));
        let words = words
            .filter(|words| words.split('|').all(|word| word.bytes().all(|b| b.is_ascii_alphanumeric())));
        return words.map_or_else(
            || "quantity".to_owned(),
            |words| words.split('|').map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", "),
        );
    }
    if let Some(values) = &schema.enum_ {
        let values: Vec<_> = values.iter().map(|value| format!("`{}`", value.0.as_str().unwrap())).collect();
        return values.join(", ");
    }
    let duration = schema.pattern.as_ref().is_some_and(|pattern| pattern.contains("(ms|s|m|h)"));
    let never = schema.pattern.as_ref().is_some_and(|pattern| pattern.contains("never"));
    match (schema.type_.as_deref().unwrap(), schema.format.as_deref()) {
        ("string", Some("date-time")) => "time",
        ("string", _) if never => "duration, `never`",
        ("string", _) if duration => "duration",
        ("string", _) => "text",
        ("array", _) => "list",
        ("object", _) => "mapping",
        (other, _) => other,
    }
    .to_owned()
}

#[test]
fn objects_that_the_page_shows_are_good_ones() {
    let pages = [
        "docs/kubernetes.md",
        "docs/quickstart-cluster.md",
        "docs/quickstart-dual-pods.md",
        "docs/saturation.md",
        "docs/slots.md",
        "docs/warmup.md",
    ];
    let pages = pages.map(|page| read(&root().join(page)));
    let mut seen = BTreeSet::new();
    for page in pages {
        let blocks: Vec<&str> = page.split("```yaml object\n").skip(1).collect();
        assert!(!blocks.is_empty(), "a page without objects");
        let texts = blocks.iter().flat_map(|block| block.split("```").next().unwrap().split("---\n"));
        seen.extend(texts.map(good));
    }
    let shown = ["InferenceModel", "AcceleratorPool", "Warmup", "DeviceConfiguration"];
    assert!(shown.iter().all(|kind| seen.contains(*kind)), "{seen:?}");
}

/// Asserts that an object of ours passes its schema and its conversion, and returns its kind.
fn good(text: &str) -> String {
    let object: Value = serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let kind = object["kind"].as_str().unwrap().to_owned();
    // Others are for the cluster's tests.
    if !object["apiVersion"].as_str().unwrap().starts_with("rouse.dev/") {
        return kind;
    }
    let definition = crd::all().into_iter().find(|crd| crd.spec.names.kind == kind).expect(&kind);
    known("", &object, schema(&definition));
    match kind.as_str() {
        "InferenceModel" => {
            let model = serde_json::from_value(object).unwrap();
            let policy =
                ConversionPolicy { dual_pods: Some(ProviderMode::Sleep), ..ConversionPolicy::default() };
            convert(&model, policy).unwrap_or_else(|refused| panic!("{refused}\n{text}"));
        }
        "Warmup" => {
            let written = serde_json::from_value(object).unwrap();
            warmup::convert(&written, Millis::secs(10)).unwrap_or_else(|refused| panic!("{refused}\n{text}"));
        }
        "DeviceConfiguration" => {
            let written = serde_json::from_value(object).unwrap();
            device_configuration::accept(&written).unwrap_or_else(|refused| panic!("{refused}\n{text}"));
        }
        _ => {}
    }
    kind
}

#[test]
fn the_page_has_every_reason_for_a_refusal() {
    let page = read(&root().join("docs/kubernetes.md"));
    let source = read(&root().join("controllers/src/rejection.rs"));
    let reasons: BTreeSet<&str> =
        source.split("=> \"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert!(reasons.len() > 8, "{reasons:?}");
    let rows = page
        .lines()
        .skip_while(|line| !line.starts_with("| Reason "))
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let told: BTreeSet<&str> =
        rows.flat_map(|row| row.split('|').nth(1).unwrap().split(',')).map(str::trim).collect();
    assert_eq!(told, reasons);
}

#[test]
fn the_pages_have_every_event() {
    for (page, reasons) in [
        ("kubernetes.md", &EventReason::MODEL_REASONS[..]),
        ("dual-pods.md", &EventReason::POD_REASONS[..]),
        ("slots.md", &EventReason::SLOT_REASONS[..]),
        ("warmup.md", &EventReason::WARMUP_REASONS[..]),
    ] {
        let page = read(&root().join("docs").join(page));
        let rows = page.lines().skip_while(|line| !line.starts_with("| Event ")).skip(2);
        let rows = rows.take_while(|line| line.starts_with('|')).map(|row| {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            (cells[1], cells[2])
        });
        let told: BTreeSet<(&str, &str)> = rows.collect();
        let wanted: BTreeSet<_> =
            reasons.iter().map(|reason| (reason.as_str(), reason.event_type())).collect();
        assert_eq!(told, wanted);
    }
}

/// Asserts that the schema has each field: an API server would drop an unknown field.
fn known(path: &str, value: &Value, schema: &JSONSchemaProps) {
    let free = schema.x_kubernetes_preserve_unknown_fields == Some(true) || path == ".metadata";
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let below = schema.properties.as_ref().and_then(|properties| properties.get(name));
                let each = match &schema.additional_properties {
                    Some(JSONSchemaPropsOrBool::Schema(each)) => Some(&**each),
                    _ => None,
                };
                match below.or(each) {
                    Some(below) => known(&format!("{path}.{name}"), value, below),
                    None => assert!(free || path.is_empty(), "there is no field {path}.{name}"),
                }
            }
        }
        Value::Array(list) => {
            if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
                list.iter().for_each(|value| known(&format!("{path}[]"), value, items));
            }
        }
        _ => {}
    }
}
