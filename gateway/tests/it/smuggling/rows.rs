//! The table of cases.

use super::SmugglingCase;

const CHAT: &str = "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n";

/// A body that names its request.
fn body(x: &str) -> String {
    format!("{{\"model\":\"m\",\"x\":\"{x}\"}}")
}

fn chunked(x: &str) -> String {
    let body = body(x);
    let (one, two) = body.split_at(7);
    format!("7\r\n{one}\r\n{:X}\r\n{two}\r\n0\r\n\r\n", two.len())
}

/// A request with a length, and with these header lines before it.
fn plain(lines: &str, x: &str) -> String {
    let body = body(x);
    format!("{CHAT}{lines}Content-Length: {}\r\n\r\n{body}", body.len())
}

fn row(
    name: &'static str,
    bytes: impl AsRef<[u8]>,
    answers: &'static [u16],
    engine: &[&str],
    open: bool,
) -> SmugglingCase {
    let engine = engine.iter().map(|x| body(x)).collect();
    SmugglingCase { name, parts: vec![bytes.as_ref().to_vec()], answers, engine, open }
}

/// The gateway refuses the request, closes the connection, and forwards nothing.
fn refused(name: &'static str, bytes: impl AsRef<[u8]>) -> SmugglingCase {
    row(name, bytes, &[400], &[], false)
}

fn served(name: &'static str, bytes: impl AsRef<[u8]>) -> SmugglingCase {
    row(name, bytes, &[200], &["a"], true)
}

pub(super) fn rows() -> Vec<SmugglingCase> {
    [lengths(), codings(), chunks(), lines(), targets(), connections(), continues()]
        .into_iter()
        .flatten()
        .collect()
}

fn lengths() -> Vec<SmugglingCase> {
    let n = body("a").len();
    let with = |lines: String| format!("{CHAT}{lines}\r\n\r\n{}", body("a"));
    let mut rows = vec![
        served("one length", plain("", "a")),
        served("the same length twice", with(format!("Content-Length: {n}\r\nContent-Length: {n}"))),
        refused("two lengths", with(format!("Content-Length: {n}\r\nContent-Length: {}", n - 1))),
        refused("a list of one length", with(format!("Content-Length: {n}, {n}"))),
        refused("a length with a space before the colon", with(format!("Content-Length : {n}"))),
        row("a length and chunks", with_both(&format!("Content-Length: 4\r\n{TE}")), &[200], &["a"], false),
        row("chunks and a length", with_both(&format!("{TE}Content-Length: 4\r\n")), &[200], &["a"], false),
        row(
            "chunks and two lengths",
            with_both(&format!("Content-Length: 4\r\n{TE}Content-Length: 9\r\n")),
            &[200],
            &["a"],
            false,
        ),
        row(
            "a length that hides a request",
            format!("{CHAT}Content-Length: 6\r\n{TE}\r\n0\r\n\r\n{}", plain("", "b")),
            &[400],
            &[],
            false,
        ),
        row("no length at all", format!("{CHAT}\r\n"), &[400], &[], true),
        row(
            "a length of GET",
            "GET /v1/models HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
            &[200],
            &[],
            false,
        ),
    ];
    for (name, length) in [
        ("a length with a plus", "+5"),
        ("a negative length", "-5"),
        ("a hexadecimal length", "0x1f"),
        ("a length with letters", "5a"),
        ("an empty length", ""),
        ("a length with a space inside", "3 1"),
        ("a length beyond 64 bits", "18446744073709551648"),
        ("a length beyond 128 bits", "99999999999999999999999999999999999999999999"),
    ] {
        rows.push(refused(name, with(format!("Content-Length: {length}"))));
    }
    rows
}

const TE: &str = "Transfer-Encoding: chunked\r\n";

fn with_both(lines: &str) -> String {
    format!("{CHAT}{lines}\r\n{}", chunked("a"))
}

fn codings() -> Vec<SmugglingCase> {
    let mut rows = Vec::new();
    for (name, coding) in [
        ("chunked", "chunked"),
        ("Chunked", "Chunked"),
        ("chunked after spaces", "  \tchunked"),
        ("chunked before spaces", "chunked \t"),
    ] {
        rows.push(served(name, with_both(&format!("Transfer-Encoding: {coding}\r\n"))));
    }
    for (name, coding) in [
        ("chunked, identity", "chunked, identity"),
        ("identity, chunked", "identity, chunked"),
        ("gzip, chunked", "gzip, chunked"),
        ("chunked, chunked", "chunked, chunked"),
        ("identity", "identity"),
        ("an unknown coding", "x"),
        ("xchunked", "xchunked"),
        ("chunked with a parameter", "chunked;q=1"),
        ("chunked with a comma", "chunked,"),
        ("chunked in quotes", "\"chunked\""),
        ("no coding", ""),
        ("chunked and a vertical tab", "chunked\x0b"),
        ("chunked and NUL", "chunked\0"),
        ("chunked and a lone CR", "\rchunked"),
        ("chunked, folded", "\r\n chunked"),
        ("chunked twice", "chunked\r\nTransfer-Encoding: chunked"),
        ("chunked and identity", "chunked\r\nTransfer-Encoding: identity"),
    ] {
        rows.push(refused(name, with_both(&format!("Transfer-Encoding: {coding}\r\n"))));
    }
    rows.push(refused(
        "a coding with a space before the colon",
        with_both("Transfer-Encoding : chunked\r\n"),
    ));
    rows.push(refused("a coding with a tab before it", with_both("\tTransfer-Encoding: chunked\r\n")));
    // This is another field, so the request has no body, and the next bytes are no request.
    rows.push(row("Transfer_Encoding", with_both("Transfer_Encoding: chunked\r\n"), &[400, 400], &[], false));
    let old = with_both(TE).replacen("HTTP/1.1", "HTTP/1.0", 1);
    rows.push(refused("chunks in HTTP/1.0", old));
    rows
}

fn chunks() -> Vec<SmugglingCase> {
    let with = |chunks: String| format!("{CHAT}{TE}\r\n{chunks}");
    let (body, n) = (body("a"), body("a").len());
    let mut rows = vec![
        served("chunks", with(chunked("a"))),
        served("a chunk with an extension", with(format!("{n:x};a=b\r\n{body}\r\n0;c=\"d\"\r\n\r\n"))),
        served("a chunk with leading zeros", with(format!("00{n:x}\r\n{body}\r\n000\r\n\r\n"))),
        served(
            "chunks with a trailer",
            with(format!("{n:x}\r\n{body}\r\n0\r\nX-T: 1\r\nContent-Length: 3\r\n\r\n")),
        ),
        refused("a chunk longer than it says", with(format!("{:x}\r\n{body}\r\n0\r\n\r\n", n - 1))),
        refused("a long extension", with(format!("{n:x};{}\r\n{body}\r\n0\r\n\r\n", "e".repeat(40 << 10)))),
        refused("many trailers", with(format!("{n:x}\r\n{body}\r\n0\r\n{}\r\n", "X: y\r\n".repeat(4000)))),
    ];
    for (name, size) in [
        ("a chunk size that is none", "zz"),
        ("an empty chunk size", ""),
        ("a negative chunk size", "-1"),
        ("a chunk size with a plus", "+1f"),
        ("a chunk size with 0x", "0x1f"),
        ("a chunk size beyond 64 bits", "1000000000000001f"),
        ("a chunk size far beyond", "ffffffffffffffffffffffffffffffff1f"),
        ("a chunk size before NUL", "1f\0"),
        ("a chunk size and a lone CR", "1f\rx"),
    ] {
        rows.push(refused(name, with(format!("{size}\r\n{body}\r\n0\r\n\r\n"))));
    }
    rows.push(refused("a chunk size with a bare LF", with(format!("{n:x}\n{body}\r\n0\r\n\r\n"))));
    rows
}

fn lines() -> Vec<SmugglingCase> {
    let many = |n: usize| (0..n).map(|i| format!("X-{i}: 1\r\n")).collect::<String>();
    let line = |line: &str| plain(&format!("{line}\r\n"), "a");
    vec![
        // The standard allows this. The gateway writes the engine's head anew, with CRLF.
        served("bare LF", plain("", "a").replacen("\r\n", "\n", 4)),
        served("empty lines before", format!("\r\n\r\n{}", plain("", "a"))),
        served("a value of any bytes", line("X-A: \u{e9}\t~")),
        refused("a space before the request", format!(" {}", plain("", "a"))),
        refused("a lone CR", line("X-A: a\rContent-Length: 1")),
        refused("CR CR LF", line("X-A: a\r")),
        refused("a folded line", line("X-A: a\r\n b")),
        refused("a folded line with a tab", line("X-A: a\r\n\tTransfer-Encoding: chunked")),
        refused("a space before the colon", line("X-A : a")),
        refused("a line without a colon", line("X-A")),
        refused("a line without a name", line(": a")),
        refused("NUL in a value", line("X-A: a\0b")),
        refused("NUL in a name", line("X-\0A: a")),
        refused("a name that is none", line("X(A): a")),
        refused("an escape in a value", line("X-A: \x1b[2J")),
        row("100 fields", plain(&many(98), "a"), &[200], &["a"], true),
        row("101 fields", plain(&many(99), "a"), &[431], &[], false),
        row("a large head", plain(&format!("X-A: {}\r\n", "a".repeat(17 << 10)), "a"), &[431], &[], false),
        refused("no Host", plain("", "a").replacen("Host: h\r\n", "", 1)),
        refused("two Hosts", line("Host: h")),
        refused("two different Hosts", line("Host: other")),
        refused("a Host that is none", plain("", "a").replacen("Host: h", "Host: a b", 1)),
        refused("a Host with a path", plain("", "a").replacen("Host: h", "Host: h/admin", 1)),
        refused("a Host with a user", plain("", "a").replacen("Host: h", "Host: u@h", 1)),
    ]
}

fn targets() -> Vec<SmugglingCase> {
    let to = |target: &str| plain("", "a").replacen("/v1/chat/completions", target, 1);
    let verb = |method: &str| plain("", "a").replacen("POST", method, 1);
    vec![
        served("an absolute target", to("http://h/v1/chat/completions")),
        served(
            "an absolute target of https",
            to("https://H:443/v1/chat/completions").replacen("Host: h", "Host: h:443", 1),
        ),
        served("a query", to("/v1/chat/completions?x=1")),
        // The target decides the route, and the engine always gets its own host.
        served("an absolute target of another host", to("http://other/v1/chat/completions")),
        served("an absolute target of another port", to("http://h:81/v1/chat/completions")),
        row("an absolute target elsewhere", to("http://h/admin/v1/fleet"), &[404], &[], false),
        row("the management API", to("/admin/v1/fleet"), &[404], &[], false),
        row("dot segments", to("/v1/models/../chat/completions"), &[405], &[], false),
        row("two slashes", to("//v1/chat/completions"), &[404], &[], false),
        row("an escaped slash", to("/v1%2Fchat/completions"), &[404], &[], false),
        row("a backslash", to("/v1\\chat/completions"), &[404], &[], false),
        row("the asterisk", to("*").replacen("POST", "OPTIONS", 1), &[404], &[], false),
        refused("a space in the target", to("/v1/chat completions")),
        refused("a tab in the target", to("/v1/chat\tcompletions")),
        refused("NUL in the target", to("/v1/chat\0completions")),
        refused("no target", to("")),
        refused("a relative target", to("v1/chat/completions")),
        row("a long target", to(&format!("/{}", "a".repeat(12 << 10))), &[404], &[], false),
        row("a lower-case method", verb("post"), &[405], &[], false),
        row("a method of others", verb("PROPFIND"), &[405], &[], false),
        row("a long method", verb(&"A".repeat(8 << 10)), &[405], &[], false),
        refused("a method that is none", verb("PO(ST")),
        row("TRACE", verb("TRACE"), &[405], &[], false),
        row("CONNECT", "CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\n\r\n", &[405], &[], true),
        row("CONNECT elsewhere", "CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: h\r\n\r\n", &[405], &[], true),
        refused("HTTP/0.9", "GET /healthz\r\n\r\n"),
        refused("HTTP/1.2", plain("", "a").replacen("HTTP/1.1", "HTTP/1.2", 1)),
        refused("http/1.1", plain("", "a").replacen("HTTP/1.1", "http/1.1", 1)),
        refused("HTTP/11.1", plain("", "a").replacen("HTTP/1.1", "HTTP/11.1", 1)),
    ]
}

fn connections() -> Vec<SmugglingCase> {
    let old = |lines: &str| plain(lines, "a").replacen("HTTP/1.1", "HTTP/1.0", 1);
    vec![
        row("two requests at once", plain("", "a") + &plain("", "b"), &[200, 200], &["a", "b"], true),
        row(
            "three requests at once, one of them chunked",
            plain("", "a") + &with_both(TE).replace("\"a\"", "\"b\"") + &plain("", "c"),
            &[200, 200, 200],
            &["a", "b", "c"],
            true,
        ),
        row(
            "a request behind a refused one",
            plain("X-A: \0\r\n", "a") + &plain("", "b"),
            &[400],
            &[],
            false,
        ),
        row(
            "a request behind a body that is not read",
            plain("", "a").replacen("/v1/chat", "/v2/chat", 1) + &plain("", "b"),
            &[404],
            &[],
            false,
        ),
        row(
            "a request behind the last one",
            plain("Connection: close\r\n", "a") + &plain("", "b"),
            &[200],
            &["a"],
            false,
        ),
        row(
            "close beside keep-alive",
            plain("Connection: close\r\nConnection: keep-alive\r\n", "a"),
            &[200],
            &["a"],
            false,
        ),
        row("HTTP/1.0", old(""), &[200], &["a"], false),
        row("HTTP/1.0 that is kept", old("Connection: keep-alive\r\n"), &[200], &["a"], true),
        row("an upgrade", plain("Connection: Upgrade\r\nUpgrade: websocket\r\n", "a"), &[501], &[], false),
        // Java's HttpClient sends this and continues with HTTP/1.1.
        served(
            "an upgrade to HTTP/2",
            plain("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n", "a"),
        ),
        // The client chooses the fields that belong to its connection. The gateway never forwards the client's length
        // field.
        served("a length that belongs to the connection", plain("Connection: content-length, host\r\n", "a")),
    ]
}

fn continues() -> Vec<SmugglingCase> {
    let head = |lines: &str, x: &str| {
        format!("{CHAT}{lines}Expect: 100-continue\r\nContent-Length: {}\r\n\r\n", body(x).len())
    };
    let parts = |name, parts: [String; 2], answers, engine: &[&str], open| SmugglingCase {
        parts: parts.into_iter().map(String::into_bytes).collect(),
        ..row(name, "", answers, engine, open)
    };
    vec![
        parts("a body after 100", [head("", "a"), body("a")], &[200], &["a"], true),
        parts(
            "chunks after 100",
            [format!("{CHAT}{TE}Expect: 100-continue\r\n\r\n"), chunked("a")],
            &[200],
            &["a"],
            true,
        ),
        parts(
            "a body and a request after 100",
            [head("", "a"), body("a") + &plain("", "b")],
            &[200, 200],
            &["a", "b"],
            true,
        ),
        parts("100-CONTINUE", [head("", "a").replace("100-c", "100-C"), body("a")], &[200], &["a"], true),
        served("a body without waiting for 100", head("", "a") + &body("a")),
        row(
            "refused early, body not sent",
            head("", "a").replacen("/v1/chat", "/v2/chat", 1),
            &[404],
            &[],
            false,
        ),
        row(
            "refused early, body sent",
            head("", "a").replacen("/v1/chat", "/v2/chat", 1) + &body("a"),
            &[404],
            &[],
            false,
        ),
        row(
            "refused for its encoding, body not sent",
            head("Content-Encoding: gzip\r\n", "a"),
            &[415],
            &[],
            false,
        ),
        row(
            "refused for its size, body not sent",
            format!("{CHAT}Expect: 100-continue\r\nContent-Length: 999999999999\r\n\r\n"),
            &[413],
            &[],
            false,
        ),
        row(
            "a body sent to HTTP/1.0 without 100",
            (head("", "a") + &body("a")).replacen("HTTP/1.1", "HTTP/1.0", 1),
            &[200],
            &["a"],
            false,
        ),
        served("another expectation", plain("Expect: wonders\r\n", "a")),
        row("100 for no body", format!("{CHAT}Expect: 100-continue\r\n\r\n"), &[400], &[], true),
    ]
}
