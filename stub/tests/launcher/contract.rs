//! Every path with every status, as the public launcher's clients know them. The tests have the names of its own tests.

use rouse_testing::raw_client::TestResponse;
use serde_json::{Value, json};

use crate::support::{launcher, start};

const INSTANCES: &str = "/v2/vllm/instances";

fn is_json(answer: &TestResponse, status: u16) {
    assert_eq!(answer.status, status, "{}", answer.text());
    assert_eq!(answer.find_header("content-type"), Some("application/json"));
}

/// Asserts that an error describes itself in `detail`.
fn refused(answer: &TestResponse, status: u16, what: &str) {
    is_json(answer, status);
    let detail = answer.json()["detail"].to_string();
    assert!(detail.contains(what), "{detail}");
}

#[test]
fn health_endpoint() {
    let answer = launcher().get("/health");
    is_json(&answer, 200);
    assert_eq!(answer.text(), r#"{"status":"OK"}"#);
}

#[test]
fn index_endpoint() {
    let answer = launcher().get("/");
    is_json(&answer, 200);
    let index = answer.json();
    assert_eq!(index["name"], "Multi-Instance vLLM Management API");
    assert_eq!(index["version"], "2.0");
    assert_eq!(index["endpoints"].as_object().unwrap().len(), 10);
    assert!(answer.text().starts_with(r#"{"name":"#), "{}", answer.text());
}

#[test]
fn what_there_is_not_is_said_in_the_same_form() {
    let launcher = launcher();
    refused(&launcher.get("/v2/vllm/elsewhere"), 404, "Not Found");
    refused(&launcher.delete("/health"), 405, "Method Not Allowed");
    refused(&launcher.request("PUT", INSTANCES, "", "{}"), 405, "Method Not Allowed");
}

#[test]
fn create_vllm_instance() {
    let launcher = launcher();
    let answer = launcher.request("POST", INSTANCES, "", r#"{"options":"'exec sleep 100'"}"#);
    is_json(&answer, 201);
    let id = answer.json()["instance_id"].as_str().unwrap().to_owned();
    assert_eq!((id.len(), id.split('-').count()), (36, 5), "{id}");
    let shown = format!(
        r#"{{"status":"running","instance_id":"{id}","revision":1,"options":"'exec sleep 100'","ready":false}}"#
    );
    assert_eq!(answer.text(), shown);
    assert_eq!(launcher.get(&format!("{INSTANCES}/{id}")).text(), shown);
}

#[test]
fn create_id_vllm_instance() {
    let launcher = launcher();
    let body = r#"{"annotations":{"b":"2","a":"1"},"options":"'exec sleep 100'","env_vars":{"Z":"z","A":"ü"},"gpu_uuids":["GPU-2","GPU-0"]}"#;
    let answer = launcher.request("PUT", &format!("{INSTANCES}/custom-id"), "", body);
    is_json(&answer, 201);
    assert_eq!(
        answer.text(),
        concat!(
            r#"{"status":"running","instance_id":"custom-id","revision":1,"options":"'exec sleep 100'","#,
            r#""gpu_uuids":["GPU-2","GPU-0"],"env_vars":{"Z":"z","A":"ü","CUDA_VISIBLE_DEVICES":"2,0"},"#,
            r#""annotations":{"b":"2","a":"1"},"ready":false}"#
        )
    );
}

#[test]
fn create_duplicate_instance() {
    let launcher = launcher();
    launcher.run("duplicate-id", "exec sleep 100");
    refused(&launcher.put("duplicate-id", &json!({"options": "x"})), 409, "already exists");
}

#[test]
fn what_cannot_be_read_is_422_with_its_place() {
    let launcher = launcher();
    for (method, path) in [("POST", INSTANCES.to_owned()), ("PUT", format!("{INSTANCES}/a"))] {
        let problem = |body: &str| {
            let answer = launcher.request(method, &path, "", body);
            is_json(&answer, 422);
            answer.json()["detail"][0].clone()
        };
        let missing = problem("{}");
        assert_eq!((&missing["type"], &missing["loc"]), (&json!("missing"), &json!(["body", "options"])));
        assert_eq!(problem("nonsense")["type"], "json_invalid");
        assert_eq!(problem(r#"{"options":7}"#)["loc"], json!(["body", "options"]));
        let quote = problem(r#"{"options":"--x 'y"}"#);
        assert_eq!((&quote["type"], &quote["loc"]), (&json!("value_error"), &json!(["body", "options"])));
    }
    for (query, place) in
        [("?detail=maybe", "detail"), ("/watch?since=now", "since"), ("/watch?ready=x", "ready")]
    {
        let answer = launcher.get(&format!("{INSTANCES}{query}"));
        is_json(&answer, 422);
        assert_eq!(answer.json()["detail"][0]["loc"], json!(["query", place]));
    }
    assert_eq!(launcher.get(INSTANCES).json()["total_instances"], 0);
}

/// The longest accepted body is still read, and is then invalid JSON.
#[test]
fn a_body_beyond_two_mebibytes_is_413() {
    let launcher = launcher();
    let (most, more) = (" ".repeat(2 << 20), " ".repeat((2 << 20) + 1));
    for (method, path) in [("POST", INSTANCES.to_owned()), ("PUT", format!("{INSTANCES}/a"))] {
        let read = launcher.request(method, &path, "", &most);
        is_json(&read, 422);
        assert_eq!(read.json()["detail"][0]["type"], "json_invalid");
        refused(&launcher.request(method, &path, "", &more), 413, "length limit exceeded");
    }
    assert_eq!(launcher.get(INSTANCES).json()["revision"], 0);
}

#[test]
fn an_unknown_accelerator_is_422_or_what_the_public_launcher_says() {
    let body = json!({"options": "", "gpu_uuids": ["GPU-0", "GPU-9"]});
    let ours = launcher();
    for answer in [ours.put("a", &body), ours.request("POST", INSTANCES, "", &body.to_string())] {
        refused(&answer, 422, "GPU-9 is not on this node: the node has GPU-0, GPU-1, GPU-2");
    }
    let public = start(&["--public-conflicts", "--mock-gpus", "--mock-gpu-count", "0"]);
    refused(&public.put("a", &body), 409, "GPU-0 is not on this node: the node has none");
    refused(&public.request("POST", INSTANCES, "", &body.to_string()), 500, "the node has none");
    // Its id is free again.
    let nothing = json!({"options": "", "gpu_uuids": []});
    refused(&public.put("a", &nothing), 500, "'vllm' cannot be run");
}

/// With a driver or without, this machine does not have this accelerator.
#[test]
fn an_accelerator_that_the_driver_does_not_know_is_422() {
    let launcher = start(&["--command", "sh -c"]);
    let body = json!({"options": "", "gpu_uuids": ["GPU-00000000-0000-0000-0000-000000000000"]});
    refused(&launcher.put("a", &body), 422, "is not on this node: the node has ");
}

#[test]
fn accelerators_may_come_from_a_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), r#"{"GPU-a": 3, "GPU-b": 0}"#).unwrap();
    let launcher = start(&["--command", "sh -c", "--accelerators-file", file.path().to_str().unwrap()]);
    let answer = launcher.put("a", &json!({"options": "'exec sleep 100'", "gpu_uuids": ["GPU-a", "GPU-b"]}));
    assert_eq!(answer.json()["env_vars"]["CUDA_VISIBLE_DEVICES"], "3,0");
}

/// 2 is clap's code for an invalid command line, 64 ours for unusable settings, 1 for a failure.
#[test]
fn exit_codes_tell_what_is_wrong() {
    let code = |flags: &[&str]| {
        let output =
            std::process::Command::new(env!("CARGO_BIN_EXE_rouse-stub")).arg("launcher").args(flags).output();
        let output = output.unwrap();
        assert!(!output.stderr.is_empty(), "{flags:?}");
        output.status.code()
    };
    assert_eq!(code(&["--no-such-flag"]), Some(2));
    for flags in [["--command", " "], ["--command", "vllm 'serve"], ["--token-file", "/nowhere"]] {
        assert_eq!(code(&flags), Some(64), "{flags:?}");
    }
    assert_eq!(code(&["--accelerators-file", "/nowhere"]), Some(64));
    assert_eq!(code(&["--host", "127.0.0.1", "--port", "0"]), Some(64), "no token is configured");
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let held = other.local_addr().unwrap().port().to_string();
    assert_eq!(code(&["--no-token", "--host", "127.0.0.1", "--port", &held]), Some(1));
}

#[test]
fn what_cannot_be_run_is_500_and_leaves_nothing() {
    let launcher = start(&["--command", "/nowhere/vllm serve"]);
    refused(&launcher.put("a", &json!({"options": "m"})), 500, "/nowhere/vllm");
    let answer = launcher.request("POST", INSTANCES, "", r#"{"options":"m"}"#);
    refused(&answer, 500, "/nowhere/vllm");
    let env = json!({"options": "m", "env_vars": {"A=B": "c"}});
    assert_eq!(launcher.put("a", &env).status, 500);
    assert_eq!(
        launcher.get(INSTANCES).text(),
        r#"{"revision":0,"total_instances":0,"running_instances":0,"instances":[]}"#
    );
    assert_eq!(std::fs::read_dir(launcher.dir.path().join("logs")).unwrap().count(), 0);
}

#[test]
fn get_nonexistent_instance_status() {
    refused(&launcher().get(&format!("{INSTANCES}/nonexistent-id")), 404, "nonexistent-id");
}

#[test]
fn list_instances() {
    let launcher = launcher();
    let object = |id: &str, revision: u64| {
        format!(
            r#"{{"status":"running","instance_id":"{id}","revision":{revision},"options":"'exec sleep 100'","ready":false}}"#
        )
    };
    launcher.run("id-2", "exec sleep 100");
    launcher.run("id-1", "exec sleep 100");
    for query in ["", "?detail=true", "?detail=True", "?detail=1"] {
        let answer = launcher.get(&format!("{INSTANCES}{query}"));
        is_json(&answer, 200);
        let (first, second) = (object("id-2", 1), object("id-1", 2));
        assert_eq!(
            answer.text(),
            format!(
                r#"{{"revision":2,"total_instances":2,"running_instances":2,"instances":[{first},{second}]}}"#
            )
        );
    }
    let answer = launcher.get(&format!("{INSTANCES}?detail=False"));
    assert_eq!(answer.text(), r#"{"revision":2,"instance_ids":["id-2","id-1"],"count":2}"#);
}

#[test]
fn delete_vllm_instance() {
    let launcher = launcher();
    launcher.run("test-id", "exec sleep 100");
    let answer = launcher.delete(&format!("{INSTANCES}/test-id"));
    is_json(&answer, 200);
    let shown = r#"{"status":"stopped","instance_id":"test-id","revision":2,"options":"'exec sleep 100'","ready":false}"#;
    assert_eq!(answer.text(), shown);
    assert_eq!(launcher.get(&format!("{INSTANCES}/test-id")).status, 404);
    assert_eq!(launcher.descendants(), Vec::<i32>::new());
}

#[test]
fn delete_nonexistent_instance() {
    refused(&launcher().delete(&format!("{INSTANCES}/nonexistent-id")), 404, "nonexistent-id");
}

#[test]
fn delete_all_instances() {
    let launcher = launcher();
    let empty = r#"{"status":"all_stopped","stopped_instances":[],"total_stopped":0}"#;
    assert_eq!(launcher.delete(INSTANCES).text(), empty);
    for id in ["id-1", "id-2", "id-3"] {
        launcher.run(id, "exec sleep 100");
    }
    let answer = launcher.delete(INSTANCES);
    is_json(&answer, 200);
    let all = answer.json();
    assert_eq!((&all["status"], &all["total_stopped"]), (&json!("all_stopped"), &json!(3)));
    let ids: Vec<&Value> =
        all["stopped_instances"].as_array().unwrap().iter().map(|i| &i["instance_id"]).collect();
    assert_eq!(ids, ["id-1", "id-2", "id-3"]);
    assert_eq!(launcher.get(INSTANCES).json()["total_instances"], 0);
}

#[test]
fn writes_of_an_older_epoch_are_refused_and_reads_are_not() {
    let launcher = launcher();
    let body = r#"{"options":"'exec sleep 100'"}"#;
    let path = format!("{INSTANCES}/a");
    let epoch = |epoch: u64| format!("x-rouse-epoch: {epoch}\r\n");
    assert_eq!(launcher.request("PUT", &path, &epoch(5), body).status, 201);
    refused(&launcher.request("DELETE", &path, &epoch(4), ""), 409, "epoch 4");
    refused(&launcher.request("DELETE", INSTANCES, &epoch(4), ""), 409, "epoch 4");
    refused(&launcher.request("POST", INSTANCES, &epoch(4), body), 409, "epoch 4");
    refused(&launcher.request("PUT", &format!("{INSTANCES}/b"), &epoch(4), body), 409, "epoch 4");
    is_json(&launcher.request("DELETE", &path, "x-rouse-epoch: new\r\n", ""), 422);
    assert_eq!(launcher.request("GET", &path, &epoch(4), "").status, 200);
    // A public controller sends no epoch, and its order is executed.
    assert_eq!(launcher.delete(&path).status, 200);
    // The epoch of a read is ignored, and no number locks leaders out.
    refused(&launcher.request("GET", &path, &epoch(u64::MAX), ""), 404, "a");
    refused(&launcher.request("PUT", &path, &epoch(u64::MAX), body), 400, "further ahead");
    assert_eq!(launcher.request("PUT", &path, &epoch(6), body).status, 201);
    // A new leader announces its epoch before its first order.
    let lead = |epoch: u64| launcher.request("POST", "/v1/epoch", "", &json!({"epoch": epoch}).to_string());
    assert_eq!(lead(7).status, 200);
    refused(&lead(6), 409, "epoch 6");
    refused(&lead(u64::MAX), 400, "further ahead");
    is_json(&launcher.request("POST", "/v1/epoch", "", "7"), 422);
    refused(&launcher.request("DELETE", &path, &epoch(6), ""), 409, "epoch 6");
    assert_eq!(launcher.request("DELETE", &path, &epoch(7), "").status, 200);
}

#[test]
fn no_web_page_is_answered() {
    let launcher = launcher();
    for page in ["origin: https://page.example\r\n", "host: page.example\r\n"] {
        for (method, path) in [("GET", INSTANCES), ("PUT", "/v2/vllm/instances/a"), ("GET", "/none")] {
            refused(
                &launcher.request(method, path, page, r#"{"options":"'exec sleep 100'"}"#),
                403,
                "a web page",
            );
        }
    }
    assert_eq!(launcher.get(INSTANCES).json()["total_instances"], 0);
}

#[test]
fn what_was_told_to_end_is_not_started_by_an_order_that_comes_later() {
    let launcher = launcher();
    let path = format!("{INSTANCES}/a");
    let generation = |generation: u64| {
        json!({"options": "'exec sleep 100'", "annotations": {"rouse.dev/generation": generation.to_string()}})
            .to_string()
    };
    let put = |of: u64| launcher.request("PUT", &path, "", &generation(of));
    assert_eq!(put(7).status, 201);
    assert_eq!(launcher.delete(&format!("{path}?generation=7")).status, 200);
    refused(&put(7), 410, "generation 7 of instance a has already ended");
    // The order to end arrives before the order to start.
    refused(&launcher.delete(&format!("{path}?generation=9")), 404, "a");
    refused(&put(9), 410, "generation 9 of instance a has already ended");
    is_json(&launcher.delete(&format!("{path}?generation=last")), 422);
    assert_eq!(put(10).status, 201);
}

#[test]
fn with_a_token_file_all_but_the_probes_demand_it() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "secret\n").unwrap();
    let launcher = start(&["--command", "sh -c", "--token-file", file.path().to_str().unwrap()]);
    assert_eq!((launcher.get("/").status, launcher.get("/health").status), (200, 200));
    for (method, path) in [
        ("GET", INSTANCES),
        ("POST", INSTANCES),
        ("DELETE", INSTANCES),
        ("GET", "/v2/vllm/instances/watch"),
        ("GET", "/v2/vllm/instances/a/log"),
        ("PUT", "/v2/vllm/instances/a"),
    ] {
        let answer = launcher.request(method, path, "authorization: Bearer secreT\r\n", "");
        refused(&answer, 401, "token");
        assert_eq!(answer.find_header("www-authenticate"), Some("Bearer"));
    }
    let listed = || launcher.request("GET", INSTANCES, "authorization: Bearer secret\r\n", "").status;
    assert_eq!(listed(), 200);
    // A new token is valid at once.
    std::fs::write(file.path(), "other").unwrap();
    assert_eq!(listed(), 401);
    // The token stays valid while the file is empty.
    std::fs::write(file.path(), "").unwrap();
    assert_eq!(launcher.request("GET", INSTANCES, "authorization: Bearer other\r\n", "").status, 200);
    assert_eq!((listed(), launcher.get(INSTANCES).status), (401, 401));
}

/// As a gateway starts it: the Pod's environment has the hash, and the gateway the token.
#[test]
fn a_token_may_be_known_by_its_hash_and_holds_beside_that_of_a_file() {
    const HASH: &str = "3c469e9d6c5875d37a43f353d4f88e61fcf812c66eee3457465a40b0da4153e0";
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "secret").unwrap();
    let path = file.path().to_str().unwrap();
    let launcher = start(&["--command", "sh -c", "--token-sha256", HASH, "--token-file", path]);
    let body = r#"{"options":"'exec sleep 100'"}"#;
    for (id, token, status) in [("a", "token", 201), ("b", "secret", 201), ("c", HASH, 401), ("c", "", 401)] {
        let shown = format!("authorization: Bearer {token}\r\n");
        let answer = launcher.request("PUT", &format!("{INSTANCES}/{id}"), &shown, body);
        assert_eq!(answer.status, status, "{token}: {}", answer.text());
    }
}

#[test]
fn so_many_instances_there_are_and_no_more() {
    let launcher = start(&["--command", "sh -c", "--max-instances", "2"]);
    let body = json!({"options": "'exec sleep 100'"});
    assert_eq!(
        (launcher.put("a", &body).status, launcher.put("b", &json!({"options": "exit"})).status),
        (201, 201)
    );
    refused(&launcher.put("c", &body), 503, "--max-instances");
    refused(&launcher.put("a", &body), 409, "already exists");
    // An instance that stopped by itself counts until it is deleted.
    assert_eq!(launcher.delete(&format!("{INSTANCES}/b")).status, 200);
    assert_eq!(launcher.put("c", &body).status, 201);
}

#[test]
fn plain_options_are_split_at_white_space_alone() {
    let launcher = start(&["--command", "echo", "--plain-options"]);
    let answer = launcher.put("a", &json!({"options": r#"--x={"level":3}  'y z"#}));
    assert_eq!(answer.status, 201, "{}", answer.text());
    assert_eq!(launcher.until_logged("a", "\n"), "--x={\"level\":3} 'y z\n");
}

#[test]
fn variables_in_options_are_replaced_if_a_flag_says_so() {
    let body = json!({
        "options": "'$(OWN) x' $(LAUNCHER_TEST) $$(OWN) $(ROUSE_SECRET) $(NOWHERE)",
        "env_vars": {"OWN": "a"},
    });
    let plain = start(&["--command", "echo"]);
    assert_eq!(plain.put("a", &body).status, 201);
    let options = "$(OWN) x $(LAUNCHER_TEST) $$(OWN) $(ROUSE_SECRET) $(NOWHERE)\n";
    assert_eq!(plain.until_logged("a", "\n"), options);
    let launcher = start(&["--command", "echo", "--expand-variables"]);
    assert_eq!(launcher.put("a", &body).status, 201);
    let mark = launcher.dir.path().display().to_string();
    let expanded = format!("a x {mark} $(OWN) $(ROUSE_SECRET) $(NOWHERE)\n");
    assert_eq!(launcher.until_logged("a", "\n"), expanded);
}
