use super::*;

/// Composes the metadata of a GGUF file.
#[derive(Default)]
pub(in crate::cli) struct GgufBuilder {
    entries: u64,
    bytes: Vec<u8>,
}

impl GgufBuilder {
    /// A model of this architecture with 2 layers, 4 heads, 16 dimensions in each, and a context of 2048 tokens.
    pub(in crate::cli) fn model(architecture: &str) -> Self {
        let own = |key: &str| format!("{architecture}.{key}");
        Self::default()
            .text("general.architecture", architecture)
            .number(&own("context_length"), 2048)
            .number(&own("block_count"), 2)
            .number(&own("embedding_length"), 64)
            .number(&own("attention.head_count"), 4)
            .texts("tokenizer.ggml.tokens", &["a", "b", "c"])
    }

    fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.entries += 1;
        push_text(&mut self.bytes, key);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
        self
    }

    pub(in crate::cli) fn text(self, key: &str, value: &str) -> Self {
        let mut bytes = Vec::new();
        push_text(&mut bytes, value);
        self.entry(key, 8, &bytes)
    }

    pub(in crate::cli) fn number(self, key: &str, value: u32) -> Self {
        self.entry(key, 4, &value.to_le_bytes())
    }

    fn numbers(self, key: &str, values: &[u32]) -> Self {
        let mut bytes = list(4, values.len() as u64);
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.entry(key, 9, &bytes)
    }

    fn texts(self, key: &str, values: &[&str]) -> Self {
        let mut bytes = list(8, values.len() as u64);
        values.iter().for_each(|value| push_text(&mut bytes, value));
        self.entry(key, 9, &bytes)
    }

    pub(in crate::cli) fn file(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend(0_u64.to_le_bytes());
        file.extend(self.entries.to_le_bytes());
        file.extend(&self.bytes);
        file
    }
}

fn push_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn list(kind: u32, length: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &length.to_le_bytes()].concat()
}

fn header(builder: &GgufBuilder) -> Result<GgufHeader, Error> {
    read_header(builder.file().as_slice())
}

#[test]
fn a_models_numbers_are_read_and_its_cache_is_computed() {
    let found = header(&GgufBuilder::model("llama").text("general.name", "x")).unwrap();
    let expected = GgufHeader {
        architecture: "llama".to_owned(),
        content: "model".to_owned(),
        context: Some(2048),
        layers: Some(2),
        // 2 layers, 4 heads, 16 dimensions, keys and values, 2 bytes.
        kv_bytes: Some(2 * 4 * 16 * 2 * 2),
        vocabulary: Some(3),
        pooling: None,
        split: None,
    };
    assert_eq!(found, expected);
}

#[test]
fn heads_may_differ_between_layers_and_have_widths_of_their_own() {
    let grouped = GgufBuilder::model("qwen3").number("qwen3.attention.head_count_kv", 2);
    assert_eq!(header(&grouped).unwrap().kv_bytes, Some(2 * 2 * 32 * 2));
    let hybrid = GgufBuilder::model("jamba").numbers("jamba.attention.head_count_kv", &[0, 2]);
    assert_eq!(header(&hybrid).unwrap().kv_bytes, Some(2 * 32 * 2));
    let wide = GgufBuilder::model("gemma3")
        .number("gemma3.attention.key_length", 256)
        .number("gemma3.attention.value_length", 128);
    assert_eq!(header(&wide).unwrap().kv_bytes, Some(2 * 4 * (256 + 128) * 2));
}

#[test]
fn parts_projectors_and_embedding_models_are_told_apart() {
    let part = GgufBuilder::model("llama").number("split.no", 1).number("split.count", 3);
    assert_eq!(header(&part).unwrap().split, Some((1, 3)));
    let projector = GgufBuilder::model("clip").text("general.type", "mmproj");
    assert_eq!(header(&projector).unwrap().content, "mmproj");
    let embedding = GgufBuilder::model("bert").number("bert.pooling_type", 1);
    assert_eq!(header(&embedding).unwrap().pooling, Some(1));
}

#[test]
fn other_files_and_versions_are_refused() {
    assert!(matches!(read_header(&b"PK\x03\x04 and more than a header"[..]), Err(Error::NotGguf)));
    for version in [0_u32, 1, 4, 3_u32.swap_bytes()] {
        let mut file = GgufBuilder::model("llama").file();
        file[4..8].copy_from_slice(&version.to_le_bytes());
        assert!(matches!(read_header(file.as_slice()), Err(Error::Version(found)) if found == version));
    }
    let mut many = GgufBuilder::default().file();
    many[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(read_header(many.as_slice()), Err(Error::Damaged(_))));
}

#[test]
fn a_file_that_is_cut_anywhere_is_an_error() {
    let file = GgufBuilder::model("llama").numbers("llama.x", &[1, 2, 3]).file();
    for length in 0..file.len() {
        assert!(read_header(&file[..length]).is_err(), "{length} of {} bytes", file.len());
    }
}

#[test]
fn no_changed_byte_makes_it_panic_or_read_without_end() {
    let file =
        GgufBuilder::model("llama").numbers("llama.x", &[1, 2, 3]).text("general.type", "model").file();
    for at in 0..file.len() {
        for value in [0, 1, 8, 9, 0x7f, 0x80, 0xff] {
            let mut changed = file.clone();
            changed[at] = value;
            // Both are fine: some bytes are part of a name, others of a length.
            if let Ok(header) = read_header(changed.as_slice()) {
                assert!(header.kv_bytes.is_none_or(|bytes| bytes <= MAX_KV_BYTES));
            }
        }
    }
}

#[test]
fn claimed_lengths_reserve_no_memory_and_end_with_the_file() {
    for kind in 0..=13 {
        let list = GgufBuilder::default().entry("x", 9, &list(kind, u64::MAX));
        assert!(header(&list).is_err(), "a list of {kind}");
    }
    let text = GgufBuilder::default().entry("x", 8, &u64::MAX.to_le_bytes());
    assert!(matches!(header(&text), Err(Error::CutOff)));
    // A list of lists of lists …
    let nested = list(9, 1).repeat(100);
    assert!(matches!(header(&GgufBuilder::default().entry("x", 9, &nested)), Err(Error::Damaged(_))));
}

#[test]
fn metadata_without_end_is_read_up_to_the_limit() {
    let start = GgufBuilder::default().entry("x", 9, &list(8, u64::MAX)).file();
    // Texts of no length, for ever.
    let endless = start.as_slice().chain(io::repeat(0));
    assert!(matches!(read_header(endless), Err(Error::CutOff)));
}

#[test]
fn absurd_numbers_give_no_cache() {
    let huge = GgufBuilder::model("x")
        .number("x.attention.key_length", u32::MAX)
        .number("x.attention.head_count_kv", u32::MAX);
    assert_eq!(header(&huge).unwrap().kv_bytes, None);
    let zero = GgufBuilder::default()
        .text("general.architecture", "x")
        .number("x.block_count", 2)
        .number("x.embedding_length", 64)
        .number("x.attention.head_count", 0);
    assert_eq!(header(&zero).unwrap().kv_bytes, None);
}
