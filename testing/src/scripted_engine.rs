//! Servers on loopback that answer by a test's script, with a thread for each connection, and the parsing of requests
//! that every such server needs.

use std::{
    io::Read,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
};

/// Starts an engine that runs this script for each connection, with the bytes received so far: at least a whole head.
/// It listens until the process ends.
pub fn scripted(script: impl Fn(TcpStream, Vec<u8>) + Send + Sync + 'static) -> SocketAddr {
    let script = Arc::new(script);
    serve(move |mut stream| {
        let script = Arc::clone(&script);
        thread::spawn(move || {
            if let Some(head) = read_head(&mut stream) {
                script(stream, head);
            }
        });
    })
}

/// Starts an engine that hands each connection to `accepted`, one after the other on one thread. It listens until the
/// process ends.
pub fn serve(mut accepted: impl FnMut(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            accepted(stream.unwrap());
        }
    });
    address
}

/// Reads until a whole head has arrived, and returns everything that arrived. `None` when the peer closes before.
pub fn read_head(stream: &mut impl Read) -> Option<Vec<u8>> {
    read_until(stream, Vec::new(), head_length)
}

/// Reads until a whole request has arrived, and returns everything that arrived. `None` when the peer closes before.
pub fn read_request(stream: &mut impl Read) -> Option<Vec<u8>> {
    read_rest_of_request(stream, Vec::new())
}

/// Like [`read_request`], with the bytes of the request that have arrived before.
pub fn read_rest_of_request(stream: &mut impl Read, received: Vec<u8>) -> Option<Vec<u8>> {
    read_until(stream, received, request_length)
}

fn read_until(
    stream: &mut impl Read,
    mut received: Vec<u8>,
    length: impl Fn(&[u8]) -> Option<usize>,
) -> Option<Vec<u8>> {
    let mut buffer = [0; 16 << 10];
    while length(&received).is_none() {
        match stream.read(&mut buffer) {
            Ok(read @ 1..) => received.extend_from_slice(&buffer[..read]),
            _ => return None,
        }
    }
    Some(received)
}

/// The length of the head with its empty line, once it is complete.
pub fn head_length(received: &[u8]) -> Option<usize> {
    Some(received.windows(4).position(|window| window == b"\r\n\r\n")? + 4)
}

/// The length of the request with its body, once it is complete. A chunked request must be the last of `received`.
pub fn request_length(received: &[u8]) -> Option<usize> {
    let length = head_length(received)?;
    let (head, body) = received.split_at(length);
    let head = String::from_utf8_lossy(head).to_lowercase();
    let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name));
    let body_length = match field("content-length:") {
        Some(value) => value.trim().parse::<usize>().unwrap(),
        None if field("transfer-encoding:").is_none() => 0,
        None => return body.ends_with(b"0\r\n\r\n").then_some(received.len()),
    };
    (body.len() >= body_length).then_some(length + body_length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_complete_with_its_body() {
        let sized = b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}";
        assert_eq!(request_length(sized), Some(sized.len()));
        assert_eq!(request_length(&[sized.as_slice(), b"GET"].concat()), Some(sized.len()));
        assert_eq!(request_length(&sized[..sized.len() - 1]), None);
        let chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
        assert_eq!(request_length(chunked), Some(chunked.len()));
        assert_eq!(request_length(&chunked[..chunked.len() - 5]), None);
        assert_eq!(request_length(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"), Some(27));
        assert_eq!(request_length(b"GET / HTTP/1.1\r\nhost: x\r\n"), None);
    }
}
