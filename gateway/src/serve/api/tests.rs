//! Tests connections that all arrive at one core's socket, as the kernel's hash may cause.

use std::{sync::Arc, time::Duration};

use rouse::fault::Fault;
use rouse_net::lease::Gate;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
};

use super::{
    connections::WorkerConnections,
    worker::{MAX_BLOCKING_THREADS, runtime},
    *,
};
use crate::{
    http::{
        NoopMetricsSink, WorkerContext,
        testing::{
            CannedEngine, InProcessGateway, RawHttpClient, completion_request, raw_request, sse_response,
            wait_until_no_leases,
        },
    },
    serve::socket::ClientSocket,
};

/// Starts a gateway where clients reach only the first core's socket.
fn uneven(cores: usize, change: impl FnOnce(&mut rouse_config::Config)) -> InProcessGateway {
    InProcessGateway::start_on(
        |config| {
            config.limits.connections_per_address = 1000;
            change(config);
        },
        |shared| {
            let anywhere = "127.0.0.1:0".parse().unwrap();
            let listeners = (0..cores).map(|_| listener::bind_one(anywhere).unwrap()).collect();
            ApiServer::from_listeners(anywhere, listeners, shared).unwrap()
        },
    )
}

/// Connects clients, each with a stream that has begun and does not end.
async fn streams(gateway: &InProcessGateway, count: usize) -> (Vec<RawHttpClient>, CannedEngine, Arc<Gate>) {
    let engine = CannedEngine::start(sse_response("{}")).await;
    let gate = gateway.open_gate();
    gateway.set_endpoints(&[(engine.address, &gate)]);
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut client = gateway.connect().await;
        client.send(completion_request(true)).await;
        client.read_until(b"data: {}\n\n").await;
        clients.push(client);
    }
    (clients, engine, gate)
}

async fn until_none_is_open(gateway: &InProcessGateway) {
    let none = async {
        while gateway.loads.connections().iter().chain(&gateway.loads.exchanges()).any(|open| *open > 0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), none).await.expect("a connection is still counted");
}

#[tokio::test]
async fn long_streams_that_all_come_to_one_core_are_shared_by_all() {
    let mut gateway = uneven(4, |_| {});
    let (clients, _engine, gate) = streams(&gateway, 200).await;
    for open in [gateway.loads.connections(), gateway.loads.exchanges()] {
        assert_eq!(open.iter().sum::<u32>(), 200);
        // The mean plus an eighth, and eight more streams.
        assert!(open.iter().all(|n| (40..=65).contains(n)), "{open:?}");
    }
    assert_eq!(gate.leases(), 200);
    drop(clients);
    for _ in 0..200 {
        assert_eq!(gateway.next_ended().await.status, 499);
    }
    wait_until_no_leases(&gate).await;
    until_none_is_open(&gateway).await;
}

/// A core that takes no connections for a while: those that it has not taken yet are all that waits for it.
#[test]
fn a_core_keeps_what_it_accepts_while_the_less_loaded_one_has_no_room() {
    runtime().unwrap().block_on(async {
        let mut context = None;
        let _gateway = InProcessGateway::start_on(
            |config| config.limits.connections_per_address = 1000,
            |shared| {
                context = Some(Arc::clone(&shared));
                let anywhere = "127.0.0.1:0".parse().unwrap();
                ApiServer::from_listeners(anywhere, vec![listener::bind_one(anywhere).unwrap()], shared)
                    .unwrap()
            },
        );
        let (_stage, stage) = watch::channel(ShutdownStage::Serving);
        let loads = CoreLoads::new(2);
        let core = WorkerContext::new(context.unwrap(), stage);
        let connections = WorkerConnections::new(core, Arc::default(), None, Arc::clone(&loads), 0);
        let (tx, mut rx) = mpsc::channel(4);
        let peers = [None, Some(tx)];
        let _busy: Vec<_> = (0..200).map(|_| loads.add_connection(0)).collect();

        let accepting = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut clients = Vec::new();
        for _ in 0..10 {
            clients.push(RawHttpClient::connect(accepting.local_addr().unwrap()).await);
            let (stream, peer) = accepting.accept().await.unwrap();
            connections.assign_core(stream, peer, &peers);
        }
        assert_eq!(loads.connections(), [206, 4]);
        for client in &mut clients[4..] {
            client.send(raw_request("GET /healthz", "", "")).await;
            assert_eq!(client.read_response().await.status, 200);
        }
        while let Ok(moved) = rx.try_recv() {
            connections.serve_moved(moved, ShutdownStage::Serving);
        }
        for client in &mut clients[..4] {
            client.send(raw_request("GET /healthz", "", "")).await;
            assert_eq!(client.read_response().await.status, 200);
        }
    });
}

/// Beside these an idle connection has what tokio keeps for a socket, its part of the list of connections, and its
/// key's secret.
#[tokio::test]
async fn an_idle_connection_is_small() {
    let gateway = InProcessGateway::start(|_| {});
    let shared = ServerContext::new(
        Arc::clone(&gateway.driver) as Arc<dyn crate::http::DriverApi>,
        Arc::clone(&gateway.config),
        Arc::new(NoopMetricsSink),
    );
    let core = WorkerContext::new(shared, watch::channel(ShutdownStage::Serving).1);
    let loads = CoreLoads::new(1);
    let connections = WorkerConnections::new(core, Arc::default(), None, Arc::clone(&loads), 0);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let socket = ClientSocket::new(listener.accept().await.unwrap().0, ShutdownStage::Serving);
    // With tokio's 104 bytes, the task is an allocation of 640 bytes.
    let task = size_of_val(&connections.connection(socket, false, loads.add_connection(0)));
    assert!(task <= 536, "{task}");
    // With its counts, an allocation of 320 bytes.
    assert!(size_of::<ClientSocket>() <= 304, "{}", size_of::<ClientSocket>());
}

#[tokio::test]
async fn an_even_load_stays_where_it_was_accepted() {
    let gateway = uneven(2, |_| {});
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = gateway.connect().await;
        client.send(raw_request("GET /healthz", "", "")).await;
        assert_eq!(client.read_response().await.status, 200);
        clients.push(client);
    }
    assert_eq!(gateway.loads.connections(), [20, 0], "a few are no imbalance");
}

#[tokio::test]
async fn a_connection_keeps_its_place_among_those_of_its_address_when_it_moves() {
    let gateway = uneven(2, |config| {
        config.limits.connections_per_address = 150;
        // The first connection must still be open when the last arrives, however long that takes.
        config.limits.connection_idle = rouse::units::Millis::secs(600);
    });
    for _ in 0..2 {
        let mut clients = Vec::new();
        for _ in 0..150 {
            let mut client = gateway.connect().await;
            client.send(raw_request("GET /healthz", "", "")).await;
            assert_eq!(client.read_response().await.status, 200);
            clients.push(client);
        }
        assert!(gateway.loads.connections()[1] > 0);
        assert_eq!(gateway.connect().await.read_response().await.status, 429);
        drop(clients);
        until_none_is_open(&gateway).await;
    }
}

#[tokio::test]
async fn what_moves_while_the_gateway_drains_is_answered() {
    for _ in 0..10 {
        let mut gateway = uneven(3, |_| {});
        let mut clients = Vec::new();
        for n in 0..400 {
            if n == 350 {
                gateway.stage.send_replace(ShutdownStage::Draining);
            }
            let Ok(stream) = std::net::TcpStream::connect(gateway.address) else { break };
            stream.set_nonblocking(true).unwrap();
            let mut client = RawHttpClient::from_stream(TcpStream::from_std(stream).unwrap());
            // The kernel resets connections that were not accepted before the shutdown, even before the client sends.
            if client.stream.write_all(raw_request("GET /healthz", "", "").as_bytes()).await.is_err() {
                break;
            }
            clients.push(client);
        }
        assert!(clients.len() >= 350);
        // These connections arrived before the shutdown was announced.
        for client in &mut clients[..350] {
            assert_eq!(client.read_response().await.status, 200);
        }
        drop(clients);
        tokio::time::timeout(Duration::from_secs(5), &mut gateway.run).await.unwrap().unwrap();
        assert_eq!(gateway.loads.connections(), [0, 0, 0]);
    }
}

#[tokio::test]
async fn a_moved_stream_is_told_that_the_gateway_ends_and_is_closed_within_two_seconds() {
    let mut gateway = uneven(2, |_| {});
    let (mut clients, _engine, gate) = streams(&gateway, 60).await;
    assert!(gateway.loads.connections()[1] > 0);
    gateway.stage.send_replace(ShutdownStage::Terminating);
    gate.close();
    gate.revoke(Fault::ShuttingDown);
    for client in &mut clients {
        let rest = String::from_utf8(client.read_to_end().await).unwrap();
        assert!(rest.contains("\"code\":\"shutting_down\""), "{rest}");
    }
    tokio::time::timeout(Duration::from_secs(4), &mut gateway.run).await.unwrap().unwrap();
}

#[test]
fn what_is_done_beside_a_core_takes_few_threads_however_much_there_is() {
    use std::sync::{Condvar, Mutex};
    let most = Arc::new((Mutex::new((0, 0)), Condvar::new()));
    let runtime = runtime().unwrap();
    runtime.block_on(async {
        let jobs = (0..4 * MAX_BLOCKING_THREADS).map(|_| {
            let most = Arc::clone(&most);
            tokio::task::spawn_blocking(move || {
                let (counted, more) = &*most;
                let mut counts = counted.lock().unwrap();
                counts.0 += 1;
                counts.1 = counts.1.max(counts.0);
                more.notify_all();
                // Long enough for more jobs to begin, if they could.
                let span = Duration::from_millis(50);
                counts = more
                    .wait_timeout_while(counts, span, |counts| counts.1 <= MAX_BLOCKING_THREADS)
                    .unwrap()
                    .0;
                counts.0 -= 1;
            })
        });
        for job in jobs.collect::<Vec<_>>() {
            job.await.unwrap();
        }
    });
    let most = most.0.lock().unwrap().1;
    assert!((1..=MAX_BLOCKING_THREADS).contains(&most), "{most}");
}
