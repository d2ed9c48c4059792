//! Readers of `multipart/form-data` like those behind the gateway, each with its own treatment of corner cases. A model
//! that any of them finds must be the model that the gateway routes by.

/// Each reader's values of `model`.
pub(super) fn all(content_type: &[u8], body: &[u8]) -> [(&'static str, Vec<Vec<u8>>); 3] {
    let text = String::from_utf8_lossy(content_type).into_owned();
    [
        ("by the letter", by_the_letter(&text, body)),
        ("by the line", by_the_line(&text, body)),
        ("by splitting", by_splitting(&text, body)),
    ]
}

/// Like python-multipart under Starlette: CRLF throughout, the last of two parameters, quoted pairs resolved.
fn by_the_letter(content_type: &str, body: &[u8]) -> Vec<Vec<u8>> {
    let Some(boundary) = parameters(content_type).into_iter().rev().find(|(key, _)| key == "boundary") else {
        return Vec::new();
    };
    let delimiter = [b"\r\n--", boundary.1.as_bytes()].concat();
    let body = [b"\r\n", body].concat();
    let mut models = Vec::new();
    let mut rest = after(&body, &delimiter);
    while let Some(part) = rest.and_then(|rest| rest.strip_prefix(b"\r\n")) {
        let end = find(part, &delimiter).unwrap_or(part.len());
        if let Some(split) = find(&part[..end], b"\r\n\r\n") {
            let header = String::from_utf8_lossy(&part[..split]).into_owned();
            let disposition = header
                .split("\r\n")
                .filter_map(|line| line.split_once(':'))
                .filter(|(name, _)| name.eq_ignore_ascii_case("content-disposition"))
                .last();
            let given = disposition.map(|(_, value)| parameters(value)).unwrap_or_default();
            let name = given.iter().rev().find(|(key, _)| key == "name");
            if name.is_some_and(|(_, name)| name == "model") {
                models.push(part[split + 4..end].to_vec());
            }
        }
        rest = part.get(end + delimiter.len()..);
    }
    models
}

/// A tolerant reader: any line end, white space anywhere, names in any case, encoded or not.
fn by_the_line(content_type: &str, body: &[u8]) -> Vec<Vec<u8>> {
    let Some((_, boundary)) = parameters(content_type).into_iter().find(|(key, _)| key == "boundary") else {
        return Vec::new();
    };
    let delimiter = format!("--{boundary}").into_bytes();
    let mut models = Vec::new();
    // Whether the line is in a part's header or its content, and whether the part is a model.
    let (mut in_header, mut is_model, mut content) = (false, false, Vec::<u8>::new());
    for line in body.split_inclusive(|byte| *byte == b'\n') {
        let bare = line.trim_ascii_end();
        if bare.starts_with(&delimiter) {
            if is_model {
                let end = content.strip_suffix(b"\n").unwrap_or(&content);
                models.push(end.strip_suffix(b"\r").unwrap_or(end).to_vec());
            }
            (in_header, is_model) = (!bare[delimiter.len()..].starts_with(b"--"), false);
            content.clear();
        } else if in_header {
            in_header = !bare.is_empty();
            let line = String::from_utf8_lossy(bare).into_owned();
            if is_disposition(&line) {
                is_model |= parameters(&line).iter().any(|(key, name)| {
                    let key = key.trim_end_matches(|char: char| char.is_ascii_digit() || char == '*');
                    let name = name.rsplit('\'').next().unwrap_or_default();
                    key == "name" && name.replace('\\', "").replace("%6d", "m").trim() == "model"
                });
            }
        } else {
            content.extend_from_slice(line);
        }
    }
    models
}

/// Like cpp-httplib: it finds everything by searching, and quotes protect nothing.
fn by_splitting(content_type: &str, body: &[u8]) -> Vec<Vec<u8>> {
    let Some((_, boundary)) = content_type.rsplit_once("boundary=") else { return Vec::new() };
    let boundary = boundary.split(';').next().unwrap_or_default().trim().trim_matches('"');
    let delimiter = format!("--{boundary}").into_bytes();
    let mut models = Vec::new();
    let mut rest = after(body, &delimiter);
    while let Some(part) = rest {
        let end = find(part, &delimiter).unwrap_or(part.len());
        if let Some(split) = find(&part[..end], b"\r\n\r\n") {
            let header = String::from_utf8_lossy(&part[..split]).into_owned();
            let is_model = header
                .lines()
                .filter(|line| is_disposition(line))
                .flat_map(|line| line.split(';').filter_map(|piece| piece.trim().split_once('=')))
                .any(|(key, name)| key == "name" && name.trim_matches('"') == "model");
            if is_model {
                let content = &part[split + 4..end];
                models.push(content.strip_suffix(b"\r\n").unwrap_or(content).to_vec());
            }
        }
        rest = part.get(end + delimiter.len()..);
    }
    models
}

fn is_disposition(line: &str) -> bool {
    line.split_once(':').is_some_and(|(name, _)| name.trim().eq_ignore_ascii_case("content-disposition"))
}

/// Parses `; key=value` and `; key="value"`, with quoted pairs resolved.
fn parameters(value: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut chars = value.chars().peekable();
    while chars.by_ref().any(|char| char == ';') {
        let mut key = String::new();
        while let Some(char) = chars.next_if(|char| !matches!(char, '=' | ';')) {
            key.push(char);
        }
        if chars.next_if_eq(&'=').is_none() {
            continue;
        }
        let mut text = String::new();
        if chars.next_if_eq(&'"').is_some() {
            while let Some(char) = chars.next().filter(|char| *char != '"') {
                text.push(if char == '\\' { chars.next().unwrap_or(char) } else { char });
            }
        } else {
            while let Some(char) = chars.next_if(|char| *char != ';') {
                text.push(char);
            }
        }
        found.push((key.trim().to_ascii_lowercase(), text.trim().to_owned()));
    }
    found
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

fn after<'a>(haystack: &'a [u8], needle: &[u8]) -> Option<&'a [u8]> {
    find(haystack, needle).map(|at| &haystack[at + needle.len()..])
}
