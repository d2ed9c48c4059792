//! Reads what a GGUF file says about its model: the metadata before the weights.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Files come from anywhere, so no length of
//! a file is trusted: reading ends at [`MAX_HEADER_BYTES`], and only short texts and lists are kept. Each entry and
//! each element of a list takes bytes of the file, so this bound is also one on time.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
};

/// The most metadata that is read. A vocabulary of 260,000 words with its merges has about 20 MiB.
const MAX_HEADER_BYTES: u64 = 64 << 20;
/// More entries than any model has: usual are 20 to 60.
const MAX_ENTRIES: u64 = 100_000;
/// The format's own limit for keys. Longer texts, such as chat templates, are skipped.
const MAX_TEXT_BYTES: u64 = 0xffff;
/// Lists with one number for each layer are kept; those with one for each word are only counted.
const MAX_LIST: u64 = 4096;
/// The deepest list of lists that is read. No known file has one.
const MAX_DEPTH: u32 = 3;
/// A cache of more bytes for one token is a sign of wrong numbers.
const MAX_KV_BYTES: u64 = 64 << 20;

#[derive(Debug, thiserror::Error)]
pub(in crate::cli) enum Error {
    #[error("cannot read it: {0}")]
    Io(io::Error),
    #[error("it does not begin like a GGUF file")]
    NotGguf,
    #[error("its version of the format is {0}: only 2 and 3 are known")]
    Version(u32),
    #[error("it is cut off, or its metadata exceeds 64 MiB")]
    CutOff,
    #[error("its metadata is damaged: {0}")]
    Damaged(&'static str),
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof { Self::CutOff } else { Self::Io(error) }
    }
}

/// What the metadata of one file says. A `None` is what it does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::cli) struct GgufHeader {
    /// `general.architecture`, such as `llama` or `qwen3`.
    pub(in crate::cli) architecture: String,
    /// `general.type`: `model` unless the file says otherwise.
    pub(in crate::cli) content: String,
    /// The longest context that the model was trained for, in tokens.
    pub(in crate::cli) context: Option<u64>,
    pub(in crate::cli) layers: Option<u64>,
    /// Bytes of the KV cache for each token, with 16 bits for each number.
    pub(in crate::cli) kv_bytes: Option<u64>,
    /// Words of the vocabulary.
    pub(in crate::cli) vocabulary: Option<u64>,
    /// How an embedding is made of the last layer; 4 is a reranker. Only embedding models have it.
    pub(in crate::cli) pooling: Option<u64>,
    /// Number of this part, from 0, and of all parts.
    pub(in crate::cli) split: Option<(u64, u64)>,
}

/// One value of the metadata, if it is kept.
#[derive(Debug)]
enum GgufValue {
    Number(u64),
    Text(String),
    Numbers(Vec<u64>),
    /// A list that is not kept, with its length.
    List(u64),
    Skipped,
}

/// Reads the metadata of a file.
pub(in crate::cli) fn read_file(path: &Path) -> Result<GgufHeader, Error> {
    read_header(BufReader::with_capacity(1 << 16, File::open(path)?))
}

fn read_header(input: impl Read) -> Result<GgufHeader, Error> {
    let mut reader = HeaderReader { input: input.take(MAX_HEADER_BYTES) };
    if reader.bytes::<4>()? != *b"GGUF" {
        return Err(Error::NotGguf);
    }
    let version = reader.u32()?;
    if !(2..=3).contains(&version) {
        return Err(Error::Version(version));
    }
    let (_tensors, entries) = (reader.u64()?, reader.u64()?);
    if entries > MAX_ENTRIES {
        return Err(Error::Damaged("it has too many entries"));
    }
    let mut metadata = GgufMetadata::default();
    for _ in 0..entries {
        let key = reader.text()?.ok_or(Error::Damaged("a key is too long"))?;
        let kind = reader.u32()?;
        let value = reader.value(kind, 0)?;
        if !matches!(value, GgufValue::Skipped) {
            metadata.0.insert(key, value);
        }
    }
    Ok(metadata.header())
}

/// Reads values in the order of the file.
struct HeaderReader<R> {
    input: io::Take<R>,
}

impl<R: Read> HeaderReader<R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn skip(&mut self, count: u64) -> Result<(), Error> {
        if count == 0 {
            return Ok(());
        }
        let skipped = io::copy(&mut self.input.by_ref().take(count), &mut io::sink())?;
        if skipped == count { Ok(()) } else { Err(Error::CutOff) }
    }

    /// Reads a text; `None`, and skips it, if it is longer than [`MAX_TEXT_BYTES`].
    fn text(&mut self) -> Result<Option<String>, Error> {
        let length = self.u64()?;
        let Some(length) = usize::try_from(length).ok().filter(|_| length <= MAX_TEXT_BYTES) else {
            self.skip(length)?;
            return Ok(None);
        };
        let mut bytes = vec![0; length];
        self.input.read_exact(&mut bytes)?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<GgufValue, Error> {
        Ok(match kind {
            8 => self.text()?.map_or(GgufValue::Skipped, GgufValue::Text),
            9 => self.list(depth)?,
            _ => self.number(kind)?.map_or(GgufValue::Skipped, GgufValue::Number),
        })
    }

    /// Reads a number; `None` if it is negative or no integer.
    fn number(&mut self, kind: u32) -> Result<Option<u64>, Error> {
        Ok(match kind {
            // The last of these is a truth value.
            0 | 7 => Some(u8::from_le_bytes(self.bytes()?).into()),
            1 => u64::try_from(i8::from_le_bytes(self.bytes()?)).ok(),
            2 => Some(u16::from_le_bytes(self.bytes()?).into()),
            3 => u64::try_from(i16::from_le_bytes(self.bytes()?)).ok(),
            4 => Some(self.u32()?.into()),
            5 => u64::try_from(i32::from_le_bytes(self.bytes()?)).ok(),
            10 => Some(self.u64()?),
            11 => u64::try_from(i64::from_le_bytes(self.bytes()?)).ok(),
            6 => {
                self.skip(4)?;
                None
            }
            12 => {
                self.skip(8)?;
                None
            }
            _ => return Err(Error::Damaged("an entry has an unknown type")),
        })
    }

    fn list(&mut self, depth: u32) -> Result<GgufValue, Error> {
        if depth > MAX_DEPTH {
            return Err(Error::Damaged("lists are nested too deeply"));
        }
        let (kind, length) = (self.u32()?, self.u64()?);
        let size = match kind {
            0 | 1 | 7 => Some(1),
            2 | 3 => Some(2),
            4..=6 => Some(4),
            10..=12 => Some(8),
            _ => None,
        };
        match size {
            Some(_) if length <= MAX_LIST => {
                let numbers = (0..length).map(|_| Ok(self.number(kind)?.unwrap_or_default()));
                return Ok(GgufValue::Numbers(numbers.collect::<Result<_, Error>>()?));
            }
            Some(size) => self.skip(length.checked_mul(size).ok_or(Error::CutOff)?)?,
            None => {
                for _ in 0..length {
                    if kind == 8 {
                        let length = self.u64()?;
                        self.skip(length)?;
                    } else {
                        self.value(kind, depth + 1)?;
                    }
                }
            }
        }
        Ok(GgufValue::List(length))
    }
}

/// The entries that are kept, by key.
#[derive(Default)]
struct GgufMetadata(BTreeMap<String, GgufValue>);

impl GgufMetadata {
    fn text(&self, key: &str) -> Option<&str> {
        match self.0.get(key)? {
            GgufValue::Text(text) => Some(text),
            _ => None,
        }
    }

    fn number(&self, key: &str) -> Option<u64> {
        match self.0.get(key)? {
            GgufValue::Number(number) => Some(*number),
            _ => None,
        }
    }

    fn header(&self) -> GgufHeader {
        // Names are shown to people, and some of them go into a file.
        let plain = |text: &str| text.chars().filter(|c| !c.is_control()).take(64).collect::<String>();
        let architecture = self.text("general.architecture").map(plain).unwrap_or_default();
        let own = |key: &str| self.number(&format!("{architecture}.{key}"));
        let vocabulary = match self.0.get("tokenizer.ggml.tokens") {
            Some(GgufValue::List(length)) => Some(*length),
            _ => own("vocab_size"),
        };
        GgufHeader {
            content: self.text("general.type").map_or_else(|| "model".to_owned(), plain),
            context: own("context_length").filter(|context| *context > 0),
            layers: own("block_count"),
            kv_bytes: self.kv_bytes(&architecture),
            vocabulary,
            pooling: own("pooling_type"),
            split: self.number("split.no").zip(self.number("split.count")),
            architecture,
        }
    }

    /// Returns the bytes of keys and values of one token, over all layers.
    fn kv_bytes(&self, architecture: &str) -> Option<u64> {
        let own = |key: &str| self.number(&format!("{architecture}.{key}"));
        let layers = own("block_count")?;
        let heads = own("attention.head_count");
        // A list has one number for each layer: layers of other kinds than attention have none.
        let all_heads = match self.0.get(&format!("{architecture}.attention.head_count_kv")) {
            Some(GgufValue::Numbers(of_layers)) => {
                of_layers.iter().fold(0, |sum: u64, heads| sum.saturating_add(*heads))
            }
            Some(GgufValue::Number(of_each)) => of_each.saturating_mul(layers),
            _ => heads?.saturating_mul(layers),
        };
        let width = || own("embedding_length")?.checked_div(heads?);
        let key = own("attention.key_length").or_else(width)?;
        let value = own("attention.value_length").or_else(width)?;
        let bytes = all_heads.saturating_mul(key.saturating_add(value)).saturating_mul(2);
        (1..=MAX_KV_BYTES).contains(&bytes).then_some(bytes)
    }
}

#[cfg(test)]
pub(in crate::cli) mod tests;
