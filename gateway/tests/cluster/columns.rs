//! The columns of `kubectl get`: the API server builds these tables on request.

use kube::{
    Api,
    api::{Patch, PatchParams},
};
use rouse_controllers::crd::{
    AcceleratorNode, AcceleratorPool, DeviceConfiguration, DeviceInstance, GatewayReplica, InferenceModel,
    Warmup,
};
use serde_json::{Map, Value, json};

use crate::{
    objects::{
        full_device_configuration, full_device_instance, full_model, full_node, full_pool, full_replica,
        full_warmup,
    },
    support::{FIELD_MANAGER, get, own_cluster},
};

pub(crate) const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

/// The columns' names and the cells of the only row. Cells with an age become `ago`.
pub(crate) fn table(table: &Value) -> Map<String, Value> {
    let columns = table["columnDefinitions"].as_array().unwrap().iter();
    let rows = table["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{rows:?}");
    let shown = columns.zip(rows[0]["cells"].as_array().unwrap()).map(|(column, cell)| {
        let is_span = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
        let ago = column["type"] == "date" && cell.as_str().is_some_and(is_span);
        (column["name"].as_str().unwrap().to_owned(), if ago { json!("ago") } else { cell.clone() })
    });
    shown.collect()
}

#[tokio::test]
async fn the_columns_show_what_the_objects_say() {
    let cluster = own_cluster().await;
    let client = cluster.client().await.unwrap();
    let namespace = cluster.namespace("columns").await.unwrap();
    let name = namespace.name().to_owned();

    macro_rules! shown {
        ($kind:ty, $api:expr, $plural:literal, $path:expr, $full:expr, $want:expr) => {{
            let api: Api<$kind> = $api;
            let (spec, status) = $full;
            for (below, part) in [(None, json!({ "spec": spec })), (Some("status"), json!({ "status": status }))] {
                let mut object = part;
                object["apiVersion"] = json!("rouse.dev/v1alpha1");
                object["kind"] = json!(<$kind as kube::Resource>::kind(&()));
                object["metadata"] = json!({ "name": name });
                let (parameters, patch) = (PatchParams::apply(FIELD_MANAGER), Patch::Apply(&object));
                match below {
                    None => drop(api.patch(&name, &parameters, &patch).await.unwrap()),
                    Some(_) => drop(api.patch_status(&name, &parameters, &patch).await.unwrap()),
                }
            }
            let path = format!("/apis/rouse.dev/v1alpha1/{}{}?fieldSelector=metadata.name%3D{name}", $path, $plural);
            let shown = table(&get(&client, &path, TABLE).await);
            assert_eq!(json!(shown), $want);
        }};
    }

    let inside = format!("namespaces/{name}/");
    shown!(
        InferenceModel,
        namespace.api(),
        "inferencemodels",
        inside,
        full_model(),
        json!({
            "Name": name, "Model": "meta-llama/Llama-3.3-70B-Instruct", "Ready": true, "Status": "Deployed",
            "Replicas": 2, "Memory": "75Gi", "Mode": "deployment", "Last Request": "ago", "Message": "It serves.",
            "Age": "ago",
        })
    );
    shown!(
        GatewayReplica,
        namespace.api(),
        "gatewayreplicas",
        inside,
        full_replica(),
        json!({
            "Name": name, "Address": "10.0.0.7:8080", "Waiting": 3, "In Flight": 5, "Age": "ago",
        })
    );
    shown!(
        Warmup,
        namespace.api(),
        "warmups",
        inside,
        full_warmup(),
        json!({
            "Name": name, "Phase": "InProgress", "Target": "nodes", "Desired": 5, "Active": 1, "Succeeded": 2,
            "Failed": 1, "Age": "ago",
        })
    );
    shown!(
        AcceleratorPool,
        Api::all(client.clone()),
        "acceleratorpools",
        "",
        full_pool(),
        json!({
            "Name": name, "Ready": "True", "Nodes": 2, "Accelerators": 16, "Total": "1200Gi", "Allocated": "80Gi",
            "Available": "1120Gi", "Reservations": 1, "Age": "ago",
        })
    );
    shown!(
        AcceleratorNode,
        Api::all(client.clone()),
        "acceleratornodes",
        "",
        full_node(),
        json!({
            "Name": name, "Pool": "default", "Type": "NVIDIA-H200", "Accelerators": 1, "Healthy": 1, "Total": "80Gi", "Reserved": "40Gi", "Age": "ago",
        })
    );
    shown!(
        DeviceConfiguration,
        Api::all(client.clone()),
        "deviceconfigurations",
        "",
        full_device_configuration(),
        json!({
            "Name": name, "Accepted": "True", "Capacity": 5, "Devices": 1, "Slots": 5, "Used": 2, "Age": "ago",
        })
    );
    shown!(
        DeviceInstance,
        Api::all(client.clone()),
        "deviceinstances",
        "",
        full_device_instance(),
        json!({
            "Name": name, "Configuration": "box", "Device": "box-1", "Shared": true, "Capacity": 5,
            "Nodes": "[\"gpu-node-1\",\"gpu-node-2\"]", "Age": "ago",
        })
    );
}
