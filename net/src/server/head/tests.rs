use super::*;

fn read(wire: &str) -> Result<RequestHead, HeadRefusal> {
    let limits = Http1Limits::default();
    let (length, head) = parse(wire.as_bytes(), &limits, 1000)?.expect("a complete head");
    assert_eq!(length, wire.len());
    Ok(head)
}

fn framing(version: &str, fields: &[&str]) -> Result<(RequestFraming, bool, Vec<String>), HeadRefusal> {
    let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
    let head = read(&format!("POST /a {version}\r\n{fields}\r\n"))?;
    let lengths = head.parts.headers.get_all(header::CONTENT_LENGTH);
    let lengths = lengths.iter().map(|length| length.to_str().unwrap().to_owned()).collect();
    Ok((head.framing, head.facts.keep_alive, lengths))
}

#[test]
fn a_head_is_read_whole() {
    let fields = "Host: x\r\nX-A: 1 \r\nx-a:\r\nX-B: \u{e9}\r\nexpect: 100-continue\r\n\r\n";
    let wire = &format!("PUT http://h:1/a?b HTTP/1.0\r\n{fields}");
    let head = read(wire).unwrap();
    assert_eq!((head.parts.method, head.parts.version), (Method::PUT, Version::HTTP_10));
    assert_eq!(head.parts.uri, "http://h:1/a?b");
    let values: Vec<_> =
        head.parts.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    let values_of = |name: &str| -> Vec<&[u8]> {
        values.iter().filter(|(other, _)| *other == name).map(|(_, value)| *value).collect()
    };
    assert_eq!(values_of("host"), [b"x"]);
    assert_eq!(values_of("x-a"), [&b"1"[..], b""]);
    assert_eq!(values_of("x-b"), ["\u{e9}".as_bytes()]);
    assert!(!head.expects_continue && !head.facts.keep_alive);
    for end in 0..wire.len() {
        let part = parse(&wire.as_bytes()[..end], &Http1Limits::default(), 1000);
        assert!(matches!(part, Ok(None)), "{end} bytes");
    }
    let refused = parse(wire.as_bytes(), &Http1Limits::default(), wire.len() - 1).unwrap_err();
    assert_eq!(refused, HeadRefusal::TooLarge);
    let target = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(MAX_TARGET_BYTES));
    let refused = parse(target.as_bytes(), &Http1Limits::default(), 1 << 20).unwrap_err();
    assert_eq!((refused, refused.status().as_u16()), (HeadRefusal::TargetTooLong, 414));
}

#[test]
fn the_framing_is_that_of_the_only_field_about_it_or_refused() {
    use RequestFraming::{Chunked, Empty, Length};
    for (fields, framed, keep_alive, lengths) in [
        (&[][..], Empty, true, &[][..]),
        (&["Content-Length: 0"], Empty, true, &["0"]),
        (&["Content-Length: 03"], Length(3), true, &["03"]),
        (&["Content-Length: 3", "Content-Length: 3"], Length(3), true, &["3"]),
        (&["Transfer-Encoding: Chunked"], Chunked, true, &[]),
        // Neither reader may take the connection's next bytes for a request.
        (&["Content-Length: 3", "Transfer-Encoding: chunked"], Chunked, false, &[]),
        (&["Transfer-Encoding: chunked", "Content-Length: x"], Chunked, false, &[]),
        (&["Connection: x", "Connection: keep-alive, CLOSE"], Empty, false, &[]),
    ] {
        let lengths: Vec<String> = lengths.iter().map(ToString::to_string).collect();
        assert_eq!(framing("HTTP/1.1", fields), Ok((framed, keep_alive, lengths)), "{fields:?}");
    }
    let old_is_kept = |fields: &[&str]| framing("HTTP/1.0", fields).unwrap().1;
    assert!(old_is_kept(&["Connection: Keep-Alive"]));
    assert!(!old_is_kept(&[]) && !old_is_kept(&["Connection: keep-alive", "Connection: close"]));
    for fields in [
        &["Transfer-Encoding: gzip, chunked"][..],
        &["Transfer-Encoding: gzip"],
        &["Transfer-Encoding:"],
        &["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
        &["Content-Length: 3", "Content-Length: 4"],
        &["Content-Length: 3, 3"],
        &["Content-Length: -3"],
        &["Content-Length:"],
        &["Content-Length: 18446744073709551616"],
    ] {
        assert!(matches!(framing("HTTP/1.1", fields), Err(HeadRefusal::Malformed(_))), "{fields:?}");
    }
    assert!(framing("HTTP/1.0", &["Transfer-Encoding: chunked"]).is_err());
}

#[test]
fn a_blank_line_is_found_however_it_is_cut() {
    for (bytes, found) in [
        ("a\r\n\r\n", true),
        ("a\n\n", true),
        ("a\n\r\n", true),
        ("a\r\n\r", false),
        ("a\r\nb\r\n", false),
        ("a\r\r\n", false),
    ] {
        for searched in 0..bytes.len() {
            assert_eq!(has_blank_line(bytes.as_bytes(), searched), found, "{bytes:?} from {searched}");
        }
    }
    for (bytes, length) in [("\r\n\n\r\nGET", 5), ("\r", 0), ("\rGET", 0), ("GET", 0), ("\n", 1)] {
        assert_eq!(leading_empty_lines(bytes.as_bytes()), length);
    }
}
