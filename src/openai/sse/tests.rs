use proptest::prelude::*;

use super::*;

fn scan(stream: &[u8]) -> (Facts, bool) {
    let mut scanner = Scanner::new();
    scanner.feed(stream);
    (*scanner.facts(), scanner.at_border())
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
        Facts { events: 3, done: true, usage: Some(Usage { prompt: 12, completion: 7 }), ..Facts::default() }
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
    assert_eq!(facts.usage, Some(Usage { prompt: 1, completion: 2 }));
    assert_eq!(facts.events, 1);
}

#[test]
fn a_frame_of_any_size_costs_no_memory() {
    assert!(size_of::<Scanner>() <= 256, "{}", size_of::<Scanner>());
}

fn piece() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("data: [DONE]\n\n".to_owned()),
        Just("data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4}}\r\n\r\n".to_owned()),
        Just("data: {\"error\":{\"x\":[1,{}]}}\n\n".to_owned()),
        Just(": beat\n".to_owned()),
        "(data|event|id|:| |\\[DONE\\]|error|\\{|\\}|\\[|\\]|\"usage\"|\\\\|\"|,|:|1|\r|\n){0,12}",
        "\\PC{0,20}\r?\n",
    ]
}

proptest! {
    #[test]
    fn any_cutting_gives_the_same_result(
        pieces in prop::collection::vec(piece(), 0..12),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let stream = pieces.concat().into_bytes();
        let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
        places.extend([0, stream.len()]);
        places.sort_unstable();
        let mut cut = Scanner::new();
        for pair in places.windows(2) {
            cut.feed(&stream[pair[0]..pair[1]]);
        }
        prop_assert_eq!((*cut.facts(), cut.at_border()), scan(&stream));
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
        let mut scanner = Scanner::new();
        scanner.feed(front);
        scanner.feed(back);
        prop_assert_eq!(scanner.facts().usage, Some(Usage { prompt, completion }));
        prop_assert_eq!(scanner.facts().events, 1);
    }
}
