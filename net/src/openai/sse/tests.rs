use proptest::prelude::*;

use super::*;
use crate::openai::stable_hash;

fn scan(stream: &[u8]) -> (ResponseFacts, bool) {
    let mut scanner = ResponseScanner::new();
    scanner.feed(stream);
    (*scanner.facts(), scanner.at_event_boundary())
}

const CHAT: &str = concat!(
    ": a comment\n\n",
    "data: {\"choices\":[{\"delta\":{\"content\":\"a \\\"usage\\\":{\\\"prompt_tokens\\\":9} {[\"}}],\"usage\":null}\n\n",
    "data: {\"choices\":[{\"delta\":{\"content\":\"b\"},\"usage\":{\"prompt_tokens\":8}}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\": 12,\"prompt_tokens_details\":{\"cached_tokens\":3},",
    "\"total_tokens\":19,\"completion_tokens\":7}}\n\n",
    "data: [DONE]\n\n",
);

#[test]
fn a_chat_stream_is_counted_and_only_the_engines_own_usage_is_believed() {
    let (facts, border) = scan(CHAT.as_bytes());
    assert_eq!(
        facts,
        ResponseFacts {
            events: 3,
            done: true,
            usage: Some(TokenUsage { prompt: 12, completion: 7 }),
            ..ResponseFacts::default()
        }
    );
    assert!(border);
}

#[test]
fn the_border_is_after_the_blank_line_and_nowhere_else() {
    for (stream, border) in [
        ("", true),
        ("d", false),
        ("data: x", false),
        ("data: x\n", false),
        ("data: x\n\n", true),
        ("data: x\r\n\r\n", true),
        ("data: x\r\r", true),
        ("data: x\r\n\r", true),
        ("data: x\n\n\n", true),
        ("data: x\n\n:", false),
        (": beat\n\n", true),
        ("data\n", false),
    ] {
        assert_eq!(scan(stream.as_bytes()).1, border, "{stream:?}");
    }
}

#[test]
fn the_first_datum_is_seen_when_its_event_ends_and_comments_are_none() {
    assert_eq!(scan(b": hello\n\nevent: x\n\nid: 4\n\n").0.events, 0);
    assert_eq!(scan(b"data: {\"a\":1}\n").0.events, 0);
    assert_eq!(scan(b"data: {\"a\":1}\n\n").0.events, 1);
    assert_eq!(scan(b"data:{\"a\":1}\n\ndatum: x\n\ndat: y\n\n").0.events, 1);
}

#[test]
fn done_is_the_whole_datum_or_it_is_not_done() {
    for (stream, done) in [
        ("data: [DONE]\n\n", true),
        ("data:[DONE]\r\n\r\n", true),
        ("data: [DONE]\n", false),
        ("data: [DONE] \n\n", false),
        ("data: \"[DONE]\"\n\n", false),
        ("data: [DONE\n\n", false),
        ("data: [DONE]\ndata: x\n\n", false),
        (": [DONE]\n\n", false),
    ] {
        assert_eq!(scan(stream.as_bytes()).0.done, done, "{stream:?}");
    }
}

#[test]
fn an_engines_own_error_is_seen_by_name_or_by_key() {
    for (stream, error) in [
        ("data: {\"error\":{\"message\":\"x\"}}\n\n", true),
        ("data: {\"object\":\"error\",\"error\":\"x\"}\n\n", true),
        ("event: error\ndata: {}\n\n", true),
        ("data: {\"error\":null}\n\n", false),
        ("data: {\"a\":{\"error\":1}}\n\n", false),
        ("data: {\"a\":\"error\"}\n\n", false),
        ("event: errors\ndata: {}\n\n", false),
    ] {
        assert_eq!(scan(stream.as_bytes()).0.error, error, "{stream:?}");
    }
}

#[test]
fn a_datum_over_several_lines_is_one_document() {
    let (facts, _) =
        scan(b"data: {\"usage\":\ndata: {\"prompt_tokens\":1,\ndata: \"completion_tokens\":2}}\n\n");
    assert_eq!(facts.usage, Some(TokenUsage { prompt: 1, completion: 2 }));
    assert_eq!(facts.events, 1);
}

const RESPONSES: &str = concat!(
    "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,",
    "\"response\":{\"id\":\"resp_7\",\"status\":\"in_progress\",\"usage\":null,\"error\":null}}\n\n",
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"item_id\":\"msg_1\",",
    "\"delta\":\"a\",\"sequence_number\":1}\n\n",
    "event: response.completed\ndata: {\"response\":{\"output\":[{\"id\":\"msg_1\",\"usage\":{\"input_tokens\":99}}],",
    "\"id\":\"resp_7\",\"usage\":{\"input_tokens\":5,\"input_tokens_details\":{\"input_tokens\":77},\"output_tokens\":6}},",
    "\"type\":\"response.completed\",\"sequence_number\":2}\n\n",
);

#[test]
fn a_stream_of_responses_names_its_answer_counts_and_ends() {
    let (facts, border) = scan(RESPONSES.as_bytes());
    let usage = Some(TokenUsage { prompt: 5, completion: 6 });
    assert_eq!(
        facts,
        ResponseFacts { events: 3, done: true, error: false, usage, id: Some(stable_hash(b"resp_7")) }
    );
    assert!(border);
}

const MESSAGES: &str = concat!(
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"role\":\"assistant\",",
    "\"content\":[],\"usage\":{\"input_tokens\":25,\"output_tokens\":1}}}\n\n",
    "event: ping\ndata: {\"type\": \"ping\"}\n\n",
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"text\":\"x\"}}\n\n",
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":15}}\n\n",
    "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
);

#[test]
fn a_stream_of_messages_counts_in_two_places_and_ends() {
    let (facts, border) = scan(MESSAGES.as_bytes());
    let usage = Some(TokenUsage { prompt: 25, completion: 15 });
    assert_eq!(
        facts,
        ResponseFacts { events: 5, done: true, error: false, usage, id: Some(stable_hash(b"msg_1")) }
    );
    assert!(border);
    let cut = MESSAGES.len() - 30;
    assert!(!scan(&MESSAGES.as_bytes()[..cut]).0.done, "the last event has not ended");
}

#[test]
fn each_api_has_its_own_ends_by_name_and_by_type() {
    for (word, done, error) in [
        ("message_stop", true, false),
        ("response.completed", true, false),
        ("response.incomplete", true, false),
        ("response.failed", false, true),
        ("error", false, true),
        ("transcript.text.done", true, false),
        ("image_generation.completed", true, false),
        ("response.in_progress", false, false),
        ("response.completed.not", false, false),
        ("image_generation.completed_and_more", false, false),
        ("message_sto", false, false),
        ("ping", false, false),
    ] {
        for stream in [
            format!("event: {word}\ndata: {{}}\n\n"),
            format!("data: {{\"x\":[1],\"type\" : \"{word}\"}}\n\n"),
        ] {
            let (facts, _) = scan(stream.as_bytes());
            assert_eq!((facts.done, facts.error), (done, error), "{stream}");
        }
    }
    let (nested, _) =
        scan(b"data: {\"a\":{\"type\":\"error\"},\"b\":[\"type\",\"error\"],\"type\":[\"error\"]}\n\n");
    assert!(!nested.error && !nested.done);
}

#[test]
fn an_id_is_the_first_that_stands_at_the_top_or_in_the_answer() {
    for (stream, id) in [
        ("data: {\"id\":\"a\"}\n\ndata: {\"id\":\"b\"}\n\n", Some("a")),
        ("data: {\"choices\":[{\"id\":\"x\"}],\"id\":\"a\"}\n\n", Some("a")),
        ("data: {\"item\":{\"id\":\"x\"}}\n\n", None),
        ("data: {\"response\":{\"item\":{\"id\":\"x\"},\"id\":\"a\"}}\n\n", Some("a")),
        ("data: {\"response\":\"x\",\"usage\":{\"id\":\"y\"}}\n\n", None),
        ("data: {\"id\":7}\n\ndata: {\"id\":null}\n\ndata: {\"id\":\"\"}\n\n", Some("")),
        ("data: {\"id\":\"a\\/\\\"b\"}\n\n", Some("a\\/\\\"b")),
    ] {
        assert_eq!(scan(stream.as_bytes()).0.id, id.map(|id| stable_hash(id.as_bytes())), "{stream}");
    }
}

#[test]
fn a_later_count_replaces_only_what_it_names() {
    let (facts, _) = scan(
        b"data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}\n\n\
          data: {\"usage\":{\"completion_tokens\":2}}\n\ndata: {\"usage\":{\"prompt_tokens\":null}}\n\n",
    );
    assert_eq!(facts.usage, Some(TokenUsage { prompt: 3, completion: 2 }));
}

#[test]
fn an_answer_that_is_no_stream_is_read_as_one_document() {
    for (document, id, prompt, completion) in [
        (
            r#"{"id":"c","choices":[{"message":{"content":"a\n\nb","usage":{"prompt_tokens":9}}}],"usage":{"prompt_tokens":3,"completion_tokens":4}}"#,
            "c",
            3,
            4,
        ),
        (
            "{\n  \"id\" : \"m\" ,\n  \"type\": \"message\",\n  \"usage\": {\n    \"input_tokens\": 3,\n    \"output_tokens\": 4\n  }\n}\n",
            "m",
            3,
            4,
        ),
        (
            r#"{"id":"r","object":"response","error":null,"output":[{"id":"x"}],"usage":{"input_tokens":30,"output_tokens":4}}"#,
            "r",
            30,
            4,
        ),
        (
            r#"{"data":[{"embedding":[0.5,-1e-3,7]}],"id":"e","usage":{"prompt_tokens":8,"total_tokens":8}}"#,
            "e",
            8,
            0,
        ),
    ] {
        let mut scanner = ResponseScanner::for_json();
        for byte in document.as_bytes().chunks(1) {
            assert!(!scanner.facts().done || byte == b"\n");
            scanner.feed(byte);
        }
        let usage = Some(TokenUsage { prompt, completion });
        let expected = ResponseFacts {
            events: 0,
            done: true,
            error: false,
            usage,
            id: Some(stable_hash(id.as_bytes())),
        };
        assert_eq!((*scanner.facts(), scanner.at_event_boundary()), (expected, false), "{document}");
    }
    let mut scanner = ResponseScanner::for_json();
    scanner.feed(br#"{"error":{"message":"x"}}"#);
    assert!(scanner.facts().error);
}

#[test]
fn events_that_say_nothing_are_passed_over_at_once_and_others_never() {
    let nothing = r#"{"id":"c","object":"chat.completion.chunk","choices":[{"delta":{"content":" used"},"finish_reason":null}]}"#;
    let mut scanner = ResponseScanner::new();
    assert!(
        scanner.skip_plain_event(format!("data: {nothing}\n\n").as_bytes()).is_none(),
        "its id is not known yet"
    );
    scanner.facts.id = Some(1);
    for (event, dull) in [
        (format!("data: {nothing}\n\nrest"), true),
        (format!("event: content_block_delta\ndata: {nothing}\n\nrest"), true),
        (r#"data: {"type":"content_block_delta","delta":{"text":"x"}}"#.to_owned() + "\n\nrest", true),
        (r#"data: {"type":"message_stop"}"#.to_owned() + "\n\nrest", false),
        (r#"data: {"usage":null}"#.to_owned() + "\n\nrest", false),
        (r#"data: {"a":{"error":1}}"#.to_owned() + "\n\nrest", false),
        (format!("event: error\ndata: {nothing}\n\nrest"), false),
        (format!("data: {nothing}\ndata: 1\n\n"), false),
        (format!("data: {nothing}\n"), false),
        (format!("data: {nothing}\r\n\r\n"), false),
        ("data: [DONE]\n\n".to_owned(), false),
    ] {
        assert_eq!(scanner.skip_plain_event(event.as_bytes()), dull.then_some(&b"rest"[..]), "{event}");
    }
}

#[test]
fn a_frame_of_any_size_costs_no_memory() {
    assert!(size_of::<ResponseScanner>() <= 256, "{}", size_of::<ResponseScanner>());
}

/// Values with the relevant words as keys and as text, plain, escaped, and at any depth.
fn value() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        Just(r#""usage""#.to_owned()),
        Just(r#""error""#.to_owned()),
        Just(r#""type""#.to_owned()),
        Just(r#""id""#.to_owned()),
        Just(r#""message""#.to_owned()),
        Just(r#""response""#.to_owned()),
        Just(r#""prompt_tokens""#.to_owned()),
        Just(r#""output_tokens""#.to_owned()),
        Just(r#""response.completed""#.to_owned()),
        Just(r#""message_stop""#.to_owned()),
        Just(r#""\u0075sage""#.to_owned()),
        Just(r#""usag\u0065""#.to_owned()),
        Just(r#""\"usage\":{\"prompt_tokens\":3}""#.to_owned()),
        Just(r#""\\\"id\"""#.to_owned()),
        "[a-z]{0,9}".prop_map(|word| format!("\"{word}\"")),
        "\\PC{0,30}".prop_map(|text| serde_json::json!(text).to_string()),
    ];
    let leaf = prop_oneof![word.clone(), Just("null".to_owned()), any::<u16>().prop_map(|n| n.to_string())];
    leaf.prop_recursive(4, 40, 6, move |inner| {
        let member = (word.clone(), inner.clone()).prop_map(|(key, value)| format!("{key}:{value}"));
        prop_oneof![
            4 => prop::collection::vec(member, 0..6).prop_map(|members| format!("{{{}}}", members.join(","))),
            1 => prop::collection::vec(inner, 0..4).prop_map(|values| format!("[{}]", values.join(","))),
        ]
    })
}

/// An event of one line as it arrives, sometimes with a name.
fn event() -> impl Strategy<Value = String> {
    let name = prop_oneof![3 => Just(""), 1 => Just("event: ping\n"), 1 => Just("event: message_stop\n"), 1 => Just("event: x\r\n")];
    let end = prop_oneof![8 => Just("\n\n"), 1 => Just("\r\n\r\n"), 1 => Just("\r\n"), 1 => Just("\n"), 1 => Just("\r\r")];
    (name, value(), end).prop_map(|(name, value, end)| format!("{name}data: {value}{end}"))
}

fn piece() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("data: [DONE]\n\n".to_owned()),
        Just("data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4}}\r\n\r\n".to_owned()),
        Just("data: {\"error\":{\"x\":[1,{}]}}\n\n".to_owned()),
        Just(RESPONSES.to_owned()),
        Just(MESSAGES.to_owned()),
        Just(": beat\n".to_owned()),
        event(),
        "(data|event|id|:| |\\[DONE\\]|error|\\{|\\}|\\[|\\]|\"usage\"|\\\\|\"|,|:|1|\r|\n){0,12}",
        "\\PC{0,20}\r?\n",
    ]
}

proptest! {
    #[test]
    fn what_is_passed_over_at_once_is_what_following_every_byte_finds(events in prop::collection::vec(event(), 0..8)) {
        let stream = events.concat().into_bytes();
        let mut followed = ResponseScanner::new();
        stream.chunks(1).for_each(|byte| followed.feed(byte));
        prop_assert_eq!((*followed.facts(), followed.at_event_boundary()), scan(&stream), "{:?}", events);
    }

    #[test]
    fn any_cutting_gives_the_same_result(
        pieces in prop::collection::vec(piece(), 0..12),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let stream = pieces.concat().into_bytes();
        let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
        places.extend([0, stream.len()]);
        places.sort_unstable();
        let mut cut = ResponseScanner::new();
        for pair in places.windows(2) {
            cut.feed(&stream[pair[0]..pair[1]]);
        }
        prop_assert_eq!((*cut.facts(), cut.at_event_boundary()), scan(&stream));
    }

    #[test]
    fn usage_is_what_a_full_parser_finds(
        prompt in any::<u64>(), completion in any::<u64>(), text in ".{0,40}", pretty in any::<bool>(), cut in any::<prop::sample::Index>(),
    ) {
        let document = serde_json::json!({
            "choices": [{"delta": {"content": text, "usage": {"prompt_tokens": 1}}}],
            "usage": {"completion_tokens": completion, "prompt_tokens": prompt, "x": {"prompt_tokens": 5}},
        });
        let document = if pretty { format!("{document:#}").replace('\n', "\ndata: ") } else { document.to_string() };
        let stream = format!("data: {document}\n\n").into_bytes();
        let (front, back) = stream.split_at(cut.index(stream.len()));
        let mut scanner = ResponseScanner::new();
        scanner.feed(front);
        scanner.feed(back);
        prop_assert_eq!(scanner.facts().usage, Some(TokenUsage { prompt, completion }));
        prop_assert_eq!(scanner.facts().events, 1);
    }
}

#[test]
fn a_document_in_one_piece_says_what_it_says_byte_by_byte() {
    let usage = r#""usage":{"prompt_tokens":7,"completion_tokens":3,"details":{"prompt_tokens":9}}"#;
    for document in [
        format!(
            r#"{{"id":"chatcmpl-1","choices":[{{"message":{{"content":"say \"usage\": {{"}}}}],{usage}}}"#
        ),
        format!(r#"{{"id":"chatcmpl-1","choices":[{{"id":"x","usage":{{"prompt_tokens":1}}}}],{usage}}}"#),
        format!(r#" {{"id":5,"error":null,{usage}}} "#),
        format!(r#"{{"id":"a","id":"b",{usage}}}"#),
        format!(r#"{{"\u0069d":"a",{usage}}}"#),
        format!(r#"{{"response":{{"id":"inner",{usage}}}}}"#),
        format!(r#"{{"message":{{"id":"inner",{usage}}},"id":"outer"}}"#),
        r#"{"error":{"message":"no"}}"#.into(),
        r#"{"error":"no","id":"é"}"#.into(),
        r#"{"usage":{"input_tokens":7,"output_tokens":3}}"#.into(),
        r#"{"usage":{"input_tokens":7,"prompt_tokens":3}}"#.into(),
        r#"{"usage":{"input_tokens":7.5,"output_tokens":null}}"#.into(),
        r#"{"usage":{"input_tokens":99999999999999999999999}}"#.into(),
        r#"{"usage":{"prompt_tokens":-1}}"#.into(),
        r#"{"usage":null}"#.into(),
        r#"{"usage":[{"prompt_tokens":4}]}"#.into(),
        format!(r#"[{{{usage}}}]"#),
        format!(r#"{{{usage}}} and more"#),
        r#"{"usage":{"prompt_tokens":4"#.into(),
        "no JSON".into(),
        String::new(),
    ] {
        let (mut whole, mut pieces) = (ResponseScanner::for_json(), ResponseScanner::for_json());
        whole.feed(document.as_bytes());
        document.bytes().for_each(|byte| pieces.feed(&[byte]));
        assert_eq!(whole.facts(), pieces.facts(), "{document}");
    }
}
