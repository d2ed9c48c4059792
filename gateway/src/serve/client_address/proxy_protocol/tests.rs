//! Tests headers as proxies send them, and everything else that a connection may begin with.

use rouse_testing::random::TestRng;
use tokio::io::AsyncWriteExt as _;

use super::*;

/// A header with this command, family and what follows the fixed part.
fn header(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let length = u16::try_from(rest.len()).unwrap().to_be_bytes();
    [&SIGNATURE[..], &[command, family], &length, rest].concat()
}

const V4: [u8; 12] = [203, 0, 113, 9, 192, 0, 2, 1, 0x1f, 0x90, 0, 80];

fn v6() -> Vec<u8> {
    let mut bytes = vec![0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
    bytes.extend([0; 16]);
    bytes.extend([0x1f, 0x90, 0, 80]);
    bytes
}

/// Reads a header from these bytes, of which a read returns at most `chunk`. Also returns what is left.
async fn read(bytes: &[u8], chunk: usize) -> (Result<Option<SocketAddr>, String>, Vec<u8>) {
    let (mut near, mut far) = tokio::io::duplex(chunk);
    let sent = bytes.to_vec();
    let writer = tokio::spawn(async move { drop(near.write_all(&sent).await) });
    let read = read_header(&mut far).await.map_err(|error| error.to_string());
    let mut left = Vec::new();
    far.read_to_end(&mut left).await.unwrap();
    writer.await.unwrap();
    (read, left)
}

#[tokio::test]
async fn a_header_names_the_client_and_nothing_behind_it_is_read() {
    let fields = [0x04, 0, 3, b'a', b'b', b'c'];
    for (bytes, expected) in [
        (header(0x21, 0x11, &V4), Some("203.0.113.9:8080")),
        (header(0x21, 0x11, &[&V4[..], &fields].concat()), Some("203.0.113.9:8080")),
        (header(0x21, 0x21, &v6()), Some("[2001:db8::7]:8080")),
        (header(0x21, 0x21, &[v6(), vec![0; 1000]].concat()), Some("[2001:db8::7]:8080")),
        (header(0x20, 0x11, &V4), None),
        (header(0x20, 0xff, &[]), None),
        (header(0x20, 0x00, &fields), None),
        (header(0x21, 0x00, &[]), None),
        (header(0x21, 0x12, &V4), None),
        (header(0x21, 0x31, &[0; 216]), None),
    ] {
        for chunk in [1, 7, 4096] {
            let sent = [&bytes[..], b"GET / HTTP/1.1\r\n"].concat();
            let (client, left) = read(&sent, chunk).await;
            assert_eq!(client.unwrap(), expected.map(|text| text.parse().unwrap()), "{bytes:?}");
            assert_eq!(left, b"GET / HTTP/1.1\r\n", "{bytes:?}");
        }
    }
}

#[tokio::test]
async fn a_mapped_address_is_the_ipv4_address() {
    let mut mapped = vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 203, 0, 113, 9];
    mapped.extend([0; 20]);
    let (client, _) = read(&header(0x21, 0x21, &mapped), 64).await;
    assert_eq!(client.unwrap().unwrap().ip().to_string(), "203.0.113.9");
}

#[tokio::test]
async fn what_is_no_header_is_refused_with_what_it_is() {
    for (bytes, told) in [
        (b"GET /healthz HTTP/1.1\r\n\r\n".to_vec(), "does not begin with a PROXY protocol v2 header"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03abcdef".to_vec(), "does not begin with"),
        (b"\r\n\r\nGET / HTTP/1.1\r\n\r\n".to_vec(), "does not begin with"),
        (b"PROXY TCP4 203.0.113.9 192.0.2.1 8080 80\r\n".to_vec(), "send-proxy-v2"),
        (header(0x11, 0x11, &V4), "unknown version, command or address family (0x11)"),
        (header(0x22, 0x11, &V4), "unknown version, command or address family (0x22)"),
        (header(0x21, 0x41, &V4), "unknown version, command or address family (0x41)"),
        (header(0x21, 0x13, &V4), "unknown version, command or address family (0x13)"),
        (header(0x21, 0x11, &V4[..11]), "only 11 bytes for its addresses"),
        (header(0x21, 0x21, &V4), "only 12 bytes for its addresses"),
        (header(0x21, 0x11, &[0; 4081]), "has 4097 bytes, and 4096 are allowed"),
        (header(0x21, 0x11, &[0; 65_535]), "has 65551 bytes"),
        (Vec::new(), "ended before its first byte"),
        (SIGNATURE.to_vec(), "ended within its PROXY protocol header"),
    ] {
        let (read, _) = read(&bytes, 1 << 17).await;
        let error = read.unwrap_err();
        assert!(error.contains(told), "{error}, not: {told}");
    }
    assert!(read(&header(0x21, 0x11, &[0; 4080]), 8192).await.0.is_ok());
}

/// A client that speaks another protocol waits for an answer after its first few bytes.
#[tokio::test]
async fn another_protocol_is_recognised_by_its_first_byte() {
    let (mut near, mut far) = tokio::io::duplex(64);
    near.write_all(b"G").await.unwrap();
    let error = read_header(&mut far).await.unwrap_err();
    assert!(matches!(error, ProxyHeaderError::Missing), "{error}");
    // The part of a header, on the other hand, may go on.
    near.write_all(&SIGNATURE[..5]).await.unwrap();
    tokio::select! {
        biased;
        read = read_header(&mut far) => panic!("{read:?}"),
        () = std::future::ready(()) => {}
    }
}

#[tokio::test]
async fn a_header_that_is_cut_off_anywhere_is_refused() {
    let whole = header(0x21, 0x21, &[v6(), vec![7; 300]].concat());
    for end in 1..whole.len() {
        let (read, _) = read(&whole[..end], 4096).await;
        assert_eq!(read.unwrap_err(), ProxyHeaderError::Truncated.to_string(), "{end}");
    }
}

/// Any bytes: a header is read to its own end, or refused.
#[tokio::test]
async fn any_bytes_are_read_without_a_panic_and_never_too_far() {
    let mut accepted = 0;
    for seed in 0..5000 {
        let mut random = TestRng(seed);
        let length = random.below(80) as usize;
        let rest: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
        let pick = |random: &mut TestRng, usual: &[u8]| match random.below(8) {
            0 => random.below(256) as u8,
            _ => usual[random.below(usual.len() as u64) as usize],
        };
        let command = pick(&mut random, &[0x20, 0x21]);
        let family = pick(&mut random, &[0x00, 0x11, 0x12, 0x21, 0x31]);
        let mut bytes = header(command, family, &rest);
        if random.below(4) == 0 {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] = random.below(256) as u8;
        }
        let claimed = FIXED_BYTES + usize::from(u16::from_be_bytes([bytes[14], bytes[15]]));
        bytes.extend_from_slice(b"behind");
        let (read, left) = read(&bytes, 1 + random.below(64) as usize).await;
        if read.is_ok() {
            accepted += 1;
            assert_eq!(left, bytes[claimed..], "{bytes:?}");
        }
    }
    assert!(accepted > 1000, "{accepted}");
}
