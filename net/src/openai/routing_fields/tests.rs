use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn joined(pieces: &[Bytes; 3]) -> Vec<u8> {
    pieces.concat()
}

#[test]
fn model_and_stream_are_found_wherever_they_stand() {
    let body = br#" { "messages":[{"role":"user","content":"\"model\":\"x\""}] , "stream" : true,"model" : "qwen" } "#;
    let head = peek(body).unwrap();
    assert_eq!(head.model, "qwen");
    assert!(head.stream);
    assert_eq!(&body[head.model_range], br#""qwen""#);
}

#[test]
fn a_byte_order_mark_before_the_document_is_skipped_and_goes_on() {
    // The second document needs the general parser.
    for document in [r#"{"model":"qwen","stream":true}"#, r#"{"mod\u0065l":"qwen","stream":true}"#] {
        let body = Bytes::from(format!("\u{feff}{document}"));
        let head = peek(&body).unwrap();
        assert_eq!(
            (head.model.as_ref(), head.stream, &body[head.model_range.clone()]),
            ("qwen", true, &b"\"qwen\""[..])
        );
        let other = joined(&splice(&body, &head.model_range, "other"));
        assert_eq!(other, format!("\u{feff}{}", document.replace("qwen", "other")).into_bytes());
    }
    assert!(matches!(peek("\u{feff}\u{feff}{\"model\":\"m\"}".as_bytes()), Err(Error::Syntax(_))));
}

#[test]
fn a_stream_is_wanted_or_not_and_nothing_in_between_is_guessed() {
    for (value, stream) in [("true", true), ("false", false), ("null", false)] {
        let body = format!(r#"{{"model":"m","stream":{value}}}"#);
        assert_eq!(peek(body.as_bytes()).unwrap().stream, stream, "{value}");
    }
    assert!(!peek(br#"{"model":"m"}"#).unwrap().stream);
    for value in ["1", "0", "\"true\"", "\"false\"", "\"yes\"", "\"\"", "1.0", "[]", "{\"a\":true}"] {
        let body = format!(r#"{{"model":"m","stream":{value}}}"#);
        let error = peek(body.as_bytes()).unwrap_err();
        assert_eq!((error.param(), &error), (Some("stream"), &Error::StreamNotBool), "{value}");
    }
}

#[test]
fn what_cannot_be_routed_is_refused_with_the_key_named() {
    let cases: [(&[u8], Error, Option<&str>); 10] = [
        (br#"{"stream":true}"#, Error::MissingModel, Some("model")),
        (br#"{"model":7}"#, Error::ModelNotString, Some("model")),
        (br#"{"model":null}"#, Error::ModelNotString, Some("model")),
        (br#"{"model":["a"]}"#, Error::ModelNotString, Some("model")),
        (br#"{"model":""}"#, Error::ModelEmpty, Some("model")),
        (br#"{"model":"a","model":"b"}"#, Error::Duplicate("model"), Some("model")),
        (br#"{"model":"a","mod\u0065l":"a"}"#, Error::Duplicate("model"), Some("model")),
        (br#"{"stream":true,"model":"a","stream":false}"#, Error::Duplicate("stream"), Some("stream")),
        (b"[]", Error::NotAnObject, None),
        (b"\"model\"", Error::NotAnObject, None),
    ];
    for (body, error, param) in cases {
        let shown = String::from_utf8_lossy(body).into_owned();
        let got = peek(body).unwrap_err();
        assert_eq!(got, error, "{shown}");
        assert_eq!(got.param(), param, "{shown}");
    }
    for body in [
        &b""[..],
        b"{",
        b"hello",
        br#"{"model":"a"} x"#,
        br#"{"model":"a"}{}"#,
        br#"{"model":"a",}"#,
        br#"{"model":"\ud800"}"#,
        b"{\"model\":\"\xff\"}",
    ] {
        let got = peek(body).unwrap_err();
        assert!(matches!(got, Error::Syntax(_)), "{got:?} for {}", String::from_utf8_lossy(body));
    }
}

#[test]
fn background_is_whatever_an_engine_may_take_for_true() {
    for (value, background) in
        [("true", true), ("false", false), ("null", false), ("1", true), ("\"yes\"", true), ("{}", true)]
    {
        let body = format!(r#"{{"model":"m","background":{value}}}"#);
        assert_eq!(peek(body.as_bytes()).unwrap().background, background, "{value}");
    }
    let twice = peek(br#"{"model":"m","background":false,"background":true}"#).unwrap_err();
    assert_eq!(twice, Error::Duplicate("background"));
}

#[test]
fn hints_are_taken_as_they_come_and_never_refused() {
    let head = peek(
        br#"{"model":"m","prompt_cache_key":"k","previous_response_id":"resp_1","max_tokens":7,"max_tokens":"many"}"#,
    )
    .unwrap();
    assert_eq!(head.session_hash, Some(stable_hash(b"k")));
    assert_eq!(
        head.previous_response_hash,
        Some(stable_hash(b"resp_1")),
        "as the scanner of a stream finds it"
    );
    assert_eq!(head.max_tokens, None);
    for (body, most) in [
        (r#"{"model":"m","max_tokens":7}"#, Some(7)),
        (r#"{"model":"m","max_output_tokens":8,"max_tokens":7}"#, Some(8)),
        (r#"{"model":"m","max_tokens":7,"max_completion_tokens":9}"#, Some(9)),
        (r#"{"model":"m","max_tokens":7,"max_completion_tokens":null}"#, Some(7)),
        (r#"{"model":"m","max_tokens":99999999999}"#, Some(u32::MAX)),
        (r#"{"model":"m","max_tokens":-1}"#, None),
        (r#"{"model":"m","max_tokens":null,"previous_response_id":null,"prompt_cache_key":null}"#, None),
    ] {
        let head = peek(body.as_bytes()).unwrap();
        assert_eq!(
            (head.max_tokens, head.session_hash, head.previous_response_hash),
            (most, None, None),
            "{body}"
        );
    }
}

fn key(rest: &str) -> Option<ConversationKey> {
    let body = format!(r#"{{"model":"m",{rest}}}"#);
    peek(body.as_bytes()).unwrap().prefix.key(body.as_bytes())
}

fn prefix(rest: &str) -> Option<u64> {
    key(rest).map(|key| key.hash)
}

#[test]
fn every_turn_of_a_conversation_has_the_same_prefix_and_other_conversations_have_others() {
    let turns = |system: &str, first: &str| {
        let one = format!(r#"{system}{{"role":"user","content":"{first}"}}"#);
        let two = format!(r#"{one},{{"role":"assistant","content":"]}}"}},{{"role":"user","content":"b"}}"#);
        let (one, two) = (
            prefix(&format!(r#""messages":[{one}]"#)),
            prefix(&format!(r#""stream":true,"messages":[{two}]"#)),
        );
        assert_eq!(one, two, "{system} {first}");
        one.unwrap()
    };
    let system = r#"{"role":"system","content":"s"},"#;
    let late = r#"{"content":[{"role":"user","text":"s"}],"role":"developer"},"#;
    let of = [turns("", "a"), turns("", "b"), turns(system, "a"), turns(system, "b"), turns(late, "a\\\"]}")];
    let distinct: std::collections::BTreeSet<u64> = of.into_iter().collect();
    assert_eq!(distinct.len(), of.len());

    let anthropic =
        |system| prefix(&format!(r#""system":{system},"messages":[{{"role":"user","content":"a"}}]"#));
    assert_ne!(anthropic(r#""x""#), anthropic(r#""y""#));
    let responses = |instructions| prefix(&format!(r#""input":"a","instructions":"{instructions}""#));
    assert_ne!(responses("x"), responses("y"));
    assert_eq!(prefix(r#""instructions":"x","input":"a""#), responses("x"), "the order of keys is nothing");
    assert_eq!([prefix(r#""messages":[]"#), prefix(r#""messages":null"#), prefix(r#""x":1"#)], [None; 3]);
}

#[test]
fn a_long_beginning_is_hashed_up_to_its_limit() {
    let long = "x".repeat(5000);
    let of = |tail: &str| prefix(&format!(r#""messages":[{{"role":"user","content":"{long}{tail}"}}]"#));
    assert_eq!(of("a"), of("b"));
    let after = |first: &str| {
        let rest = "y".repeat(6000);
        prefix(&format!(
            r#""messages":[{{"role":"system","content":"{long}"}},{{"role":"user","content":"{first}{rest}"}}]"#
        ))
    };
    assert_ne!(after("a"), after("b"), "a long system prompt hides no longer conversation");
    let text = |tail: &str| prefix(&format!(r#""prompt":"{long}{tail}""#));
    assert_eq!(text("a"), text("b"));
}

#[test]
fn conversations_share_a_key_while_their_system_prompt_is_most_of_them() {
    let system = |length: usize| format!(r#"{{"role":"system","content":"{}"}}"#, "x".repeat(length));
    let turns = |system: &str, first: &str, more: usize| {
        let user = format!(r#"{{"role":"user","content":"{first}"}}"#);
        let answer = format!(r#",{{"role":"assistant","content":"{}"}},{user}"#, "y".repeat(more));
        let rest = if more > 0 { answer } else { String::new() };
        key(&format!(r#""messages":[{system},{user}{rest}]"#)).unwrap()
    };
    let long = system(3000);
    assert_eq!(turns(&long, "a", 0), turns(&long, "b", 0));
    assert_eq!(turns(&long, "a", 0), turns(&long, "b", 2000));
    assert_ne!(turns(&long, "a", 4000).hash, turns(&long, "b", 4000).hash);
    assert_ne!(turns(&system(3001), "a", 0), turns(&long, "a", 0));
    assert_ne!(turns(&system(1000), "a", 0), turns(&system(1000), "b", 0), "it is short");
    let apart = |first: &str| key(&format!(r#""system":"{}","messages":{first}"#, "x".repeat(3000)));
    assert_eq!(apart(r#"[{"role":"user","content":"a"}]"#), apart(r#"[{"role":"user","content":"b"}]"#));
    assert_eq!(apart("[]"), apart("null"));
}

#[test]
fn only_the_first_turn_of_a_conversation_is_new() {
    let is_new = |rest: &str| key(rest).map(|key| key.is_new);
    let (system, user) = (r#"{"role":"system","content":"s"}"#, r#"{"role":"user","content":"a"}"#);
    assert_eq!(is_new(&format!(r#""messages":[{user}]"#)), Some(true));
    assert_eq!(is_new(&format!(r#""messages":[{system},{user} ]"#)), Some(true));
    assert_eq!(is_new(&format!(r#""messages":[{system},{user} , {user}]"#)), Some(false));
    assert_eq!(is_new(r#""prompt":"a""#), Some(true));
    let long = format!(r#""system":"{}","messages":[{user}]"#, "x".repeat(3000));
    assert_eq!(is_new(&long), Some(false), "others began the same");
}

#[test]
fn a_hundred_thousand_nested_brackets_neither_overflow_nor_hide_the_model() {
    let deep = format!(r#"{{"x":{}{},"model":"m"}}"#, "[".repeat(100_000), "]".repeat(100_000));
    let on_a_small_stack = std::thread::Builder::new().stack_size(128 << 10);
    let model = on_a_small_stack
        .spawn(move || peek(deep.as_bytes()).map(|head| head.model.into_owned()))
        .unwrap()
        .join()
        .unwrap();
    assert_eq!(model.unwrap(), "m");
    let as_the_model = format!(r#"{{"model":{}"#, "[".repeat(100_000));
    assert!(matches!(peek(as_the_model.as_bytes()), Err(Error::Syntax(_))));
}

#[test]
fn a_refusal_becomes_an_invalid_request() {
    let fault = Fault::from(peek(b"{}").unwrap_err());
    assert_eq!(
        fault,
        Fault::InvalidRequest { message: "'model' is required".into(), param: Some("model".into()) }
    );
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("(model|stream|.{0,6})", inner, 0..4)
                .prop_map(|map| Value::from(serde_json::Map::from_iter(map))),
        ]
    })
}

proptest! {
    #[test]
    fn a_splice_changes_the_name_and_keeps_every_other_byte(
        mut rest in prop::collection::btree_map("[a-z\\PC]{0,8}", any_json(), 0..5),
        model in ".{1,20}",
        served in ".{0,20}",
        pretty in any::<bool>(),
    ) {
        rest.insert("model".into(), model.clone().into());
        if rest.get("stream").is_some_and(|stream| !stream.is_boolean() && !stream.is_null()) {
            rest.remove("stream");
        }
        let value = json!(rest);
        let body = Bytes::from(if pretty { serde_json::to_vec_pretty(&value) } else { serde_json::to_vec(&value) }.unwrap());
        let head = peek(&body).unwrap();
        prop_assert_eq!(&head.model, &model);
        prop_assert_eq!(head.stream, rest.get("stream") == Some(&Value::Bool(true)));

        let spliced = joined(&splice(&body, &head.model_range, &served));
        prop_assert!(spliced.starts_with(&body[..head.model_range.start]));
        prop_assert!(spliced.ends_with(&body[head.model_range.end..]));
        rest.insert("model".into(), served.into());
        prop_assert_eq!(serde_json::from_slice::<Value>(&spliced).unwrap(), json!(rest));
    }

    #[test]
    fn it_agrees_with_a_full_parser_on_any_document(value in any_json()) {
        let body = value.to_string();
        let clear = value.get("stream").is_none_or(|stream| stream.is_boolean() || stream.is_null());
        let expected = value.get("model").and_then(Value::as_str).filter(|model| clear && !model.is_empty());
        let head = peek(body.as_bytes());
        prop_assert_eq!(head.as_ref().ok().map(|head| &*head.model), expected);
    }

    #[test]
    fn no_bytes_make_it_panic(body in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(head) = peek(&body) {
            prop_assert!(head.model_range.end <= body.len());
        }
    }
}
