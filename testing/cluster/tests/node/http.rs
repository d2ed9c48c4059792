//! One raw HTTP request and its response.

use std::net::IpAddr;

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time,
};

use rouse_cluster::wait::WAIT_TIMEOUT;

pub(crate) struct NodeHttpResponse {
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// Sends a request and reads to the end of the connection.
pub(crate) async fn ask(
    ip: IpAddr,
    port: u16,
    method: &str,
    path: &str,
    body: &Value,
) -> std::io::Result<NodeHttpResponse> {
    let asked = async {
        let mut stream = TcpStream::connect((ip, port)).await?;
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {ip}\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).await?;
        let mut said = String::new();
        stream.read_to_string(&mut said).await?;
        let (head, body) = said.split_once("\r\n\r\n").unwrap_or((&said, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default();
        Ok(NodeHttpResponse { status, body: body.to_owned() })
    };
    time::timeout(WAIT_TIMEOUT, asked).await?
}
