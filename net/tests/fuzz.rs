//! Runs the bodies of the fuzz targets over their corpora, unchanged and with small changes. Fuzzing itself needs
//! another compiler and hours; this test keeps its findings fixed.

use std::{fs, path::Path};

use proptest::prelude::*;

#[path = "../../fuzz/bodies.rs"]
mod bodies;

fn corpus(of: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(of);
    let mut files: Vec<_> =
        fs::read_dir(folder).expect("the corpus").filter_map(|file| Some(file.ok()?.path())).collect();
    files.sort_unstable();
    let seeds: Vec<Vec<u8>> = files.into_iter().map(|file| fs::read(file).expect("a seed")).collect();
    assert!(seeds.len() >= 25, "{} seeds of {of}", seeds.len());
    seeds
}

#[test]
fn the_corpora_hold() {
    corpus("head").iter().for_each(|seed| bodies::head(seed));
    corpus("sse").iter().for_each(|seed| bodies::sse(seed));
    corpus("multipart").iter().for_each(|seed| bodies::multipart(seed));
    corpus("load").iter().for_each(|seed| bodies::load(seed));
    corpus("connection").iter().for_each(|seed| bodies::connection(seed));
}

#[test]
fn the_corpora_hold_cut_off_at_any_byte() {
    for (of, body) in BODIES {
        for seed in corpus(of) {
            (0..seed.len().min(600)).for_each(|end| body(&seed[..end]));
        }
    }
}

type FuzzBody = fn(&[u8]);

const BODIES: [(&str, FuzzBody); 5] = [
    ("head", bodies::head),
    ("sse", bodies::sse),
    ("multipart", bodies::multipart),
    ("load", bodies::load),
    ("connection", bodies::connection),
];

/// One change of a seed, of the kinds that a fuzzer makes most.
#[derive(Clone, Debug)]
enum SeedChange {
    Replace(u8),
    Insert(Vec<u8>),
    Remove(usize),
    /// Also inserts a piece of the seed elsewhere.
    Repeat(usize),
}

fn change() -> impl Strategy<Value = (prop::sample::Index, prop::sample::Index, SeedChange)> {
    let telling = prop::sample::select(vec![
        "\r",
        "\n",
        "\r\n",
        "\r\n\r\n",
        "\"",
        "\\",
        "\\\"",
        ";",
        "=",
        "--",
        "--x",
        "\r\n--x",
        "\r\n--x--",
        " ",
        "\t",
        "\0",
        "name=\"model\"",
        "; name=model",
        "name*=utf-8''model",
        "filename=\"",
        "Content-Disposition: form-data",
        "data: ",
        "event: error",
        "[DONE]",
        "\"model\":",
        "\"usage\":{",
        "\"id\":\"",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "null",
        "0\r\n\r\n",
        "3;x\r\nabc\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Content-Length: 3\r\n",
        "Connection: close\r\n",
    ]);
    let change = prop_oneof![
        any::<u8>().prop_map(SeedChange::Replace),
        telling.prop_map(|text| SeedChange::Insert(text.as_bytes().to_vec())),
        (1..16_usize).prop_map(SeedChange::Remove),
        (1..80_usize).prop_map(SeedChange::Repeat),
    ];
    (any::<prop::sample::Index>(), any::<prop::sample::Index>(), change)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(3000)))]
    #[test]
    fn the_corpora_hold_when_changed(
        which in 0..BODIES.len(),
        seed in any::<prop::sample::Index>(),
        changes in prop::collection::vec(change(), 1..5),
    ) {
        thread_local! {
            static CORPORA: [Vec<Vec<u8>>; BODIES.len()] = BODIES.map(|(of, _)| corpus(of));
        }
        let mut data = CORPORA.with(|corpora| seed.get(&corpora[which]).clone());
        for (at, from, change) in changes {
            let place = at.index(data.len() + 1);
            match change {
                SeedChange::Replace(byte) => {
                    if let Some(old) = data.get_mut(place) {
                        *old = byte;
                    }
                }
                SeedChange::Insert(text) => drop(data.splice(place..place, text)),
                SeedChange::Remove(most) => drop(data.drain(place..data.len().min(place + most))),
                SeedChange::Repeat(most) => {
                    let from = from.index(data.len() + 1);
                    let piece = data[from..data.len().min(from + most)].to_vec();
                    drop(data.splice(place..place, piece));
                }
            }
        }
        BODIES[which].1(&data);
    }
}
