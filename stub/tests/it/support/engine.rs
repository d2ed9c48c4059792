//! What answers readiness probes, and nothing else.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU16, Ordering},
    },
};

use tokio::time::Instant;

/// Answers each connection with the status that is set, until the test ends.
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    status: Arc<AtomicU16>,
    first_good: Arc<Mutex<Option<Instant>>>,
}

impl Engine {
    pub(crate) fn start(status: u16) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").unwrap(), status)
    }

    pub(crate) fn on(listener: TcpListener, status: u16) -> Self {
        let address = listener.local_addr().unwrap();
        let status = Arc::new(AtomicU16::new(status));
        let first_good = Arc::new(Mutex::new(None));
        let (answers, good) = (Arc::clone(&status), Arc::clone(&first_good));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let status = answers.load(Ordering::SeqCst);
                // Whoever asked may have gone.
                _ = stream.read(&mut [0; 1024]);
                if (200..300).contains(&status) {
                    good.lock().unwrap().get_or_insert_with(Instant::now);
                }
                _ = write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n");
            }
        });
        Self { address, status, first_good }
    }

    pub(crate) fn set(&self, status: u16) {
        self.status.store(status, Ordering::SeqCst);
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/health", self.address)
    }

    /// When it gave its first good answer.
    pub(crate) fn first_good(&self) -> Option<Instant> {
        *self.first_good.lock().unwrap()
    }
}
