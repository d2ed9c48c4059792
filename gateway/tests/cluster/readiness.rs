//! A gateway says that it is ready once it has seen all that it serves by.

use std::{fs, net::SocketAddr};

use rouse_cluster::wait::PATIENCE;
use serde_json::json;
use tokio::time::{Duration, sleep, timeout};

use crate::{
    client::{Answer, Client},
    world::{Starting, World, aside},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_not_see_everything_is_not_ready_and_says_what_is_missing() {
    let world = World::new("ready", 1, "16Gi").await;
    let elsewhere = world.site.cluster.namespace("ready-elsewhere").await.unwrap();
    let (own, other) = (world.name().to_owned(), elsewhere.name().to_owned());
    world.model("qwen", "10Gi", "", json!({})).await;
    // Operators ask at an address that they know before.
    let free = || SocketAddr::from(([127, 0, 0, 1], rouse::port::free().unwrap()));
    let (operators, api) = (free(), free());
    let file = world.file("gateway-0", "", "");
    let text = fs::read_to_string(&file).unwrap();
    let text = text.replace(&format!("namespaces: [{own}]"), &format!("namespaces: [{own}, {other}]"));
    let text = text.replace("api: 127.0.0.1:0", &format!("api: {api}"));
    fs::write(&file, text.replace("admin: 127.0.0.1:0", &format!("admin: {operators}"))).unwrap();
    let kubeconfig = world.site.cluster.kubeconfig(&world.site.account).unwrap();
    let starting = Starting::new(&file, &kubeconfig, &[]);

    let missing = format!("inferencemodels in {other}");
    let says = async |what: &str, fits: &dyn Fn(&Answer) -> bool| {
        let heard = async {
            loop {
                // Nothing listens before the process has come so far.
                if std::net::TcpStream::connect(operators).is_ok() {
                    let answer = aside(move || Client::new(operators).get("/readyz")).await;
                    if fits(&answer) {
                        return answer;
                    }
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, heard).await.unwrap_or_else(|_| panic!("it never says {what}"))
    };
    // Each watch comes in its own time: what may be seen is seen some time after what may not be is refused.
    let all_but_refused = |answer: &Answer| {
        let text = answer.text();
        text.contains("forbidden") && text.contains(&missing) && !text.contains(&format!("in {own}"))
    };
    let answer = says("what it may not see, and nothing else", &all_but_refused).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert_eq!(aside(move || Client::new(operators).get("/healthz")).await.status, 200);
    assert!(aside(move || Client::new(operators).get("/metrics")).await.text().contains("rouse_build_info"));
    // A model that has not been seen yet is none that there is not.
    assert!(std::net::TcpStream::connect(api).is_err(), "requests are taken");

    world.site.install("namespace.yaml", Some(&other)).await;
    assert_eq!(says("ok", &|answer| answer.text().contains("ok")).await.status, 200);
    let gateway = aside(move || starting.listening()).await;
    let client = gateway.client();
    assert_eq!(aside(move || client.chat("qwen", false, 4)).await.status, 200);
}
