use super::*;

const KIND: &str = "multipart/form-data; boundary=x";

fn boundary_of(kind: &str) -> Result<Vec<u8>, Error> {
    boundary(&HeaderValue::from_bytes(kind.as_bytes()).unwrap()).map(<[u8]>::to_vec)
}

/// One part: its disposition's parameters, other header fields, its content.
fn part(parameters: &str, fields: &str, content: &str) -> String {
    format!("Content-Disposition: form-data; {parameters}\r\n{fields}\r\n{content}")
}

fn field(name: &str, content: &str) -> String {
    part(&format!("name=\"{name}\""), "", content)
}

fn form(parts: &[String]) -> Bytes {
    let parts: String = parts.iter().map(|part| format!("--x\r\n{part}\r\n")).collect();
    format!("{parts}--x--\r\n").into()
}

fn file() -> String {
    part("name=\"file\"; filename=\"a.wav\"", "Content-Type: audio/wav\r\n", "RIFF\0\r\n--\r\n-x\r\n\r\n")
}

#[test]
fn the_model_and_the_wish_for_a_stream_are_found_among_the_parts() {
    for (parts, stream) in [
        (vec![field("model", "whisper-1"), file()], false),
        (vec![file(), field("stream", "true"), field("model", "whisper-1")], true),
        (vec![field("stream", "True"), file(), field("model", "whisper-1")], true),
        (vec![field("stream", "1"), field("model", "whisper-1")], true),
        (vec![field("stream", "FALSE"), field("model", "whisper-1")], false),
        (vec![field("stream", "0"), field("model", "whisper-1")], false),
        (
            vec![
                field("stream", "false"),
                field("timestamp_granularities[]", "word"),
                field("model", "whisper-1"),
            ],
            false,
        ),
        (vec![part("name=model", "Content-Type: text/plain; charset=UTF-8\r\n", "whisper-1")], false),
        (vec![part("name=\"f\"; filename*=utf-8''%e4", "", ""), field("model", "whisper-1")], false),
    ] {
        let body = form(&parts);
        let head = peek(&body, b"x").unwrap();
        assert_eq!((&*head.model, head.stream), ("whisper-1", stream));
        assert_eq!(&body[head.model_range], b"whisper-1");
    }
    for value in ["yes", "on", "t", "y", "", " true", "true\r\n", "2", "null"] {
        let body = form(&[field("model", "m"), field("stream", value)]);
        let error = peek(&body, b"x").unwrap_err();
        assert_eq!((error.param(), &error), (Some("stream"), &Error::StreamNotBool), "{value:?}");
    }
    let unfinished = form(&[field("model", "m")]);
    assert!(
        peek(unfinished.strip_suffix(b"\r\n").unwrap(), b"x").is_ok(),
        "the last line may end with the body"
    );
}

#[test]
fn a_splice_changes_the_model_and_keeps_every_other_byte() {
    let body = form(&[file(), field("model", "alias"), field("stream", "true")]);
    let head = peek(&body, b"x").unwrap();
    let spliced = splice(&body, &head.model_range, "org/served").concat();
    assert_eq!(spliced, form(&[file(), field("model", "org/served"), field("stream", "true")]));
    assert_eq!(peek(&spliced, b"x").unwrap().model, "org/served");
}

#[test]
fn a_boundary_is_read_where_every_reader_finds_the_same() {
    let seventy = "b".repeat(70);
    for (kind, boundary) in [
        (KIND, "x"),
        ("Multipart/Form-Data;boundary=----WebKitFormBoundary7MA4", "----WebKitFormBoundary7MA4"),
        ("multipart/form-data; boundary=\"=_Part:1/2\"; charset=utf-8", "=_Part:1/2"),
        (&format!("multipart/form-data; boundary={seventy}"), &seventy),
    ] {
        assert_eq!(boundary_of(kind).unwrap(), boundary.as_bytes(), "{kind}");
    }
    for kind in [
        "application/json",
        "multipart/form-data",
        "multipart/mixed; boundary=x",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\"\"",
        "multipart/form-data; boundary=\"",
        "multipart/form-data; boundary=\"x",
        "multipart/form-data; boundary=a b",
        "multipart/form-data; boundary=a=b",
        "multipart/form-data; boundary=\"a b\"",
        "multipart/form-data; boundary=\"a\\\"b\"",
        "multipart/form-data; boundary=\"a;b\"",
        "multipart/form-data; boundary=x; boundary=x",
        "multipart/form-data; boundary=x; boundary*=utf-8''y",
        "multipart/form-data; boundary*0=x",
        "multipart/form-data; Boundary=x",
        "multipart/form-data; a=\"boundary=y\"; boundary=x",
        "multipart/form-data; charset=utf-16; boundary=x",
        "multipart/form-data; boundary=x; charset",
        "multipart/form-data, multipart/form-data; boundary=x",
        &format!("multipart/form-data; boundary={seventy}b"),
    ] {
        assert!(matches!(boundary_of(kind), Err(Error::ContentType(_))), "{kind}");
    }
}

#[test]
fn what_another_reader_could_read_differently_is_refused() {
    let model = || field("model", "m");
    let other = |parameters: &str| form(&[model(), part(parameters, "", "evil")]);
    let raw = |header: &str| form(&[model(), format!("{header}\r\n\r\nevil")]);
    let disposition = "Content-Disposition: form-data; name=\"model\"";
    let text =
        |body: &Bytes, from: &str, to: &str| Bytes::from(String::from_utf8_lossy(body).replace(from, to));
    let cases = [
        ("a name in another charset", other("name=\"x\"; name*=utf-8''model")),
        ("only a name in another charset", other("name*=utf-8''model")),
        ("two names", other("name=\"x\"; name=\"model\"")),
        ("a name in capitals", other("NAME=\"model\"")),
        ("another parameter", other("name=\"x\"; size=3")),
        ("a backslash in a name", other("name=\"mo\\del\"")),
        ("an escaped quote", other("name=\"file\"; filename=\"\\\"; name=\\\"model\"")),
        ("a parameter in a parameter", other("name=\"file\"; filename=\"a; name=model\"")),
        ("white space in a name", other("name=\" model\"")),
        ("white space around an equals sign", other("name = \"model\"")),
        ("an encoded name", other("name=\"%6dodel\"")),
        ("a name that is not ASCII", other("name=\"mod\u{e9}l\"")),
        ("no end of a quote", other("name=\"x")),
        ("text behind a quote", other("name=\"x\"model")),
        ("a trailing semicolon", other("name=\"x\";")),
        ("no name", other("filename=\"x\"")),
        ("no disposition", raw("Content-Type: text/plain")),
        ("another disposition", raw("Content-Disposition: attachment; name=\"model\"")),
        ("two dispositions", raw(&format!("Content-Disposition: form-data; name=\"x\"\r\n{disposition}"))),
        ("a folded field", raw("Content-Disposition: form-data;\r\n name=\"model\"")),
        ("a field without a colon", raw(&format!("{disposition}\r\nx"))),
        ("a space before the colon", raw("Content-Disposition : form-data; name=\"model\"")),
        ("a bare LF between fields", raw(&format!("X: y\n{disposition}"))),
        ("a bare CR", raw(&format!("X: y\r{disposition}"))),
        ("a NUL", raw(&format!("X: \0\r\n{disposition}"))),
        ("no header", raw(&format!("\r\n{disposition}"))),
        (
            "parts in a part",
            raw("Content-Disposition: form-data; name=\"x\"\r\nContent-Type: Multipart/Mixed; boundary=y"),
        ),
        ("a header of 17 KiB", raw(&format!("{disposition}\r\nX: {}", "y".repeat(17 << 10)))),
        ("a header without an end", text(&form(&[model()]), "\r\n\r\n", "\r\n")),
        ("a boundary inside of a line", form(&[model(), field("f", "a--x")])),
        ("a boundary after a bare LF", form(&[model(), field("f", "a\n--x\nevil")])),
        ("a boundary that goes on", form(&[model(), field("f", "a\r\n--xy\r\nevil")])),
        ("white space after a boundary", text(&form(&[model()]), "--x\r\n", "--x \r\n")),
        ("something before the first boundary", Bytes::from([b"\r\n", &*form(&[model()])].concat())),
        ("something after the last boundary", Bytes::from([&*form(&[model()]), b"\r\n"].concat())),
        ("no last boundary", text(&form(&[model()]), "--x--", "")),
        ("no part", form(&[])),
        ("nothing", Bytes::new()),
        ("a declared charset", form(&[model(), field("_charset_", "utf-16")])),
        ("1001 parts", form(&vec![field("f", ""); 1001])),
    ];
    for (what, body) in cases {
        assert!(matches!(peek(&body, b"x"), Err(Error::Malformed(_))), "{what}: {:?}", peek(&body, b"x"));
    }
}

#[test]
fn a_model_is_one_short_plain_field() {
    let twice = form(&[field("model", "a"), file(), field("model", "a")]);
    assert_eq!(peek(&twice, b"x"), Err(Error::Duplicate("model")));
    let streams = form(&[field("stream", "a"), field("model", "a"), field("stream", "a")]);
    assert_eq!(peek(&streams, b"x"), Err(Error::Duplicate("stream")));
    assert_eq!(peek(&form(&[file()]), b"x"), Err(Error::MissingModel));
    for model in [
        field("model", ""),
        field("model", &"m".repeat(257)),
        field("model", "m\r\nn"),
        field("model", "m\0"),
        field("model", "m "),
        part("name=\"model\"; filename=\"m\"", "", "m"),
        part("name=\"model\"; filename*=utf-8''m", "", "m"),
        part("name=\"model\"", "Content-Transfer-Encoding: base64\r\n", "bQ=="),
        part("name=\"model\"", "Content-Type: text/plain; charset=utf-16\r\n", "m"),
        part("name=\"model\"", "Content-Type: application/json\r\n", "m"),
    ] {
        let error = peek(&form(std::slice::from_ref(&model)), b"x").unwrap_err();
        assert!(matches!(error, Error::Model(_)), "{model}: {error:?}");
        assert_eq!(error.param(), Some("model"));
    }
    let not_utf8 = form(&[field("model", "m")])
        .iter()
        .map(|&byte| if byte == b'm' { 0xff } else { byte })
        .collect::<Vec<_>>();
    assert!(peek(&not_utf8, b"x").is_err());
    assert_eq!(peek(&form(&[field("model", &"m".repeat(256))]), b"x").unwrap().model.len(), 256);
}

#[test]
fn a_refusal_says_which_rule_was_broken() {
    let fault = Fault::from(peek(&form(&[part("name=\"a\"; name=\"b\"", "", "")]), b"x").unwrap_err());
    let message = "the multipart body is malformed: a part has two names".to_owned();
    assert_eq!(fault, Fault::InvalidRequest { message, param: None });
}
