//! Parses the multipart forms of audio routes. Strict, so that a proxy that damages a boundary or a part is detected.

use std::{borrow::Cow, fmt};

use crate::content;

use super::SimRequest;

/// The uploaded file: its size and hash.
#[derive(Debug)]
pub(crate) struct AudioUpload {
    bytes: usize,
    hash: u64,
    /// `response_format`.
    pub(crate) format: String,
}

/// The transcript: the upload's size and hash, by which a client verifies that it arrived whole.
impl fmt::Display for AudioUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, FNV-1a {:016x}", self.bytes, self.hash)
    }
}

pub(super) fn read<'a>(content_type: &str, body: &'a [u8]) -> Result<SimRequest<'a>, String> {
    let mut ask = SimRequest::default();
    let mut format = "json".to_owned();
    let mut file = None;
    for (name, value) in parts(content_type, body).ok_or("the body is not a multipart form")? {
        let text = || String::from_utf8_lossy(value).into_owned();
        match name {
            "file" => file = Some(value),
            "model" if ask.model.is_some() => return Err("the form has two models".to_owned()),
            "model" => ask.model = Some(Cow::Owned(text())),
            "stream" => ask.stream = Some(value.eq_ignore_ascii_case(b"true") || value == b"1"),
            "response_format" => format = text(),
            _ => {}
        }
    }
    let file = file.ok_or("the form has no file")?;
    ask.upload = Some(AudioUpload { bytes: file.len(), hash: content::hash(file), format });
    Ok(ask)
}

/// Names and values of the parts; `None` if the form is malformed anywhere.
fn parts<'a>(content_type: &str, body: &'a [u8]) -> Option<Vec<(&'a str, &'a [u8])>> {
    let (kind, parameters) = content_type.split_once(';')?;
    let boundary = parameters.split(';').find_map(|one| one.trim().strip_prefix("boundary="))?;
    let delimiter = format!("\r\n--{}", boundary.trim_matches('"'));
    let delimiter = delimiter.as_bytes();
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    // The first delimiter has no preceding line.
    let mut rest = body.strip_prefix(delimiter.get(2..)?)?;
    let mut parts = Vec::new();
    while !rest.starts_with(b"--") {
        rest = rest.strip_prefix(b"\r\n")?;
        let end = find(rest, b"\r\n\r\n")?;
        let headers = std::str::from_utf8(rest.get(..end)?).ok()?;
        let disposition = headers.lines().find(|line| {
            line.get(..20).is_some_and(|name| name.eq_ignore_ascii_case("content-disposition:"))
        })?;
        let name = disposition.split(';').find_map(|one| one.trim().strip_prefix("name="))?;
        rest = rest.get(end + 4..)?;
        let end = find(rest, delimiter)?;
        parts.push((name.trim_matches('"'), rest.get(..end)?));
        rest = rest.get(end + delimiter.len()..)?;
    }
    Some(parts)
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    // Search the first byte first: comparing a window at every byte of a large file takes seconds in unoptimized
    // builds.
    let first = *wanted.first()?;
    let mut from = 0;
    loop {
        let at = from + bytes.get(from..)?.iter().position(|byte| *byte == first)?;
        if bytes.get(at..)?.starts_with(wanted) {
            return Some(at);
        }
        from = at + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=\"xx\"";

    #[test]
    fn a_file_with_boundaries_like_bytes_is_read_whole() {
        let body = b"--xx\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--xx\r\nContent-Type: audio/wav\r\n\
            content-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n\r\n--x\r\n\0\xff\r\n--xx--\r\n";
        let ask = read(TYPE, body).unwrap();
        assert_eq!(ask.model.as_deref(), Some("m"));
        let hash = content::hash(b"\r\n--x\r\n\0\xff");
        assert_eq!(ask.upload.unwrap().to_string(), format!("9 bytes, FNV-1a {hash:016x}"));
    }

    #[test]
    fn broken_forms_are_refused() {
        for body in [
            "",
            "--xx",
            "--xx\r\n",
            "--xx\r\n\r\n",
            "--xx--",
            "--xx\r\nContent-Disposition: form-data; name=file\r\n\r\na",
        ] {
            assert!(read(TYPE, body.as_bytes()).is_err(), "{body}");
        }
        assert!(read("application/json", b"--xx--").is_err());
    }
}
