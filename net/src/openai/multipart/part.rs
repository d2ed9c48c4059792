//! One part: its header fields, and the range of its content.

use std::ops::Range;

use memchr::memmem;

use super::{Error, MAX_PART_HEADER_BYTES, is_utf8, slice_of, split_once};

const DISPOSITION: &[u8] = b"content-disposition";
const ENCODING: &[u8] = b"content-transfer-encoding";
const TYPE: &[u8] = b"content-type";

pub(super) struct FormPart<'a> {
    pub(super) name: &'a [u8],
    /// The content's range in the body.
    pub(super) content: Range<usize>,
    is_file: bool,
    is_encoded: bool,
    kind: Option<&'a [u8]>,
}

impl<'a> FormPart<'a> {
    /// Parses the part `body[whole]`, which lies between two boundaries.
    pub(super) fn read(body: &'a [u8], whole: Range<usize>) -> Result<Self, Error> {
        let part = slice_of(body, &whole);
        let searched = part.get(..MAX_PART_HEADER_BYTES + 4).unwrap_or(part);
        let Some(blank) = memmem::find(searched, b"\r\n\r\n") else {
            let wrong = if part.len() > MAX_PART_HEADER_BYTES {
                "a part's header is longer than 16 KiB"
            } else {
                "a part's header does not end"
            };
            return Err(Error::Malformed(wrong));
        };
        let (mut disposition, mut encoding, mut kind) = (None, None, None);
        for field in lines(slice_of(part, &(0..blank))) {
            let (name, value) = split(field)?;
            let header = if name.eq_ignore_ascii_case(DISPOSITION) {
                &mut disposition
            } else if name.eq_ignore_ascii_case(ENCODING) {
                &mut encoding
            } else if name.eq_ignore_ascii_case(TYPE) {
                &mut kind
            } else {
                continue;
            };
            if header.replace(value).is_some() {
                return Err(Error::Malformed("a part has the same header field twice"));
            }
        }
        let disposition = disposition.ok_or(Error::Malformed("a part has no Content-Disposition"))?;
        let (name, is_file) = parse_disposition(disposition)?;
        // Some parsers would look for a model among the parts of a nested multipart.
        if kind
            .is_some_and(|kind| kind.get(..10).is_some_and(|kind| kind.eq_ignore_ascii_case(b"multipart/")))
        {
            return Err(Error::Malformed("a part is itself multipart"));
        }
        Ok(Self {
            name,
            content: whole.start + blank + 4..whole.end,
            is_file,
            is_encoded: encoding.is_some(),
            kind,
        })
    }

    /// Checks that every parser reads the content as the same text.
    pub(super) fn check_text(&self) -> Result<(), &'static str> {
        let plain = |kind: &[u8]| {
            let mut pieces = kind.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
            pieces.next().is_some_and(|kind| kind.eq_ignore_ascii_case(b"text/plain"))
                && pieces.all(|piece| {
                    split_once(piece, b'=').is_some_and(|(name, charset)| {
                        name.eq_ignore_ascii_case(b"charset") && is_utf8(charset)
                    })
                })
        };
        match self {
            Self { is_file: true, .. } => Err("must be a field, not a file"),
            Self { is_encoded: true, .. } => Err("must not have a Content-Transfer-Encoding"),
            Self { kind: Some(kind), .. } if !plain(kind) => Err("must be text/plain in UTF-8"),
            _ => Ok(()),
        }
    }
}

fn lines(header: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(header);
    std::iter::from_fn(move || {
        let header = rest?;
        let end = memmem::find(header, b"\r\n");
        rest = end.and_then(|end| header.get(end + 2..));
        end.map_or(Some(header), |end| header.get(..end))
    })
}

/// Splits a header field into its name and value. A continuation line begins with white space, so it has no valid name
/// and is refused.
fn split(field: &[u8]) -> Result<(&[u8], &[u8]), Error> {
    let (name, value) =
        split_once(field, b':').ok_or(Error::Malformed("a part's header field has no colon"))?;
    if name.is_empty() || !name.iter().all(|byte| is_token(*byte)) {
        return Err(Error::Malformed("a part's header field has an invalid name"));
    }
    // Bare CR and LF above all.
    if value.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t') {
        return Err(Error::Malformed("a part's header field contains a control character"));
    }
    Ok((name, value.trim_ascii()))
}

/// Returns the part's name, and whether it is a file.
fn parse_disposition(disposition: &[u8]) -> Result<(&[u8], bool), Error> {
    let semicolon = memchr::memchr(b';', disposition).unwrap_or(disposition.len());
    let (kind, mut rest) = disposition.split_at(semicolon);
    if !kind.trim_ascii().eq_ignore_ascii_case(b"form-data") {
        return Err(Error::Malformed("a part's Content-Disposition is not form-data"));
    }
    let (mut name, mut file) = (None, false);
    while let Some(after) = rest.strip_prefix(b";") {
        let DispositionParameter { key, value, rest: tail } = DispositionParameter::read(after)?;
        match key {
            b"name" if !is_plain_name(value) => {
                return Err(Error::Malformed("a part's name has characters that parsers read differently"));
            }
            b"name" if name.replace(value).is_some() => {
                return Err(Error::Malformed("a part has two names"));
            }
            b"name" => {}
            b"filename" | b"filename*" => file = true,
            // Some parsers take `name*` or `NAME` for the name, and others ignore it.
            _ => {
                return Err(Error::Malformed(
                    "a part's Content-Disposition has a parameter other than name and filename",
                ));
            }
        }
        rest = tail.trim_ascii_start();
    }
    if !rest.is_empty() {
        return Err(Error::Malformed("a part's Content-Disposition is not a list of parameters"));
    }
    Ok((name.ok_or(Error::Malformed("a part has no name"))?, file))
}

/// One parameter, and the text after it.
struct DispositionParameter<'a> {
    key: &'a [u8],
    value: &'a [u8],
    rest: &'a [u8],
}

impl<'a> DispositionParameter<'a> {
    fn read(text: &'a [u8]) -> Result<Self, Error> {
        let text = text.trim_ascii_start();
        let (key, text) =
            split_once(text, b'=').ok_or(Error::Malformed("a part's parameter has no value"))?;
        let Some(quoted) = text.strip_prefix(b"\"") else {
            let end = text.iter().position(|byte| !is_token(*byte)).unwrap_or(text.len());
            let (value, rest) = text.split_at(end);
            return Ok(Self { key, value, rest });
        };
        let (value, rest) =
            split_once(quoted, b'"').ok_or(Error::Malformed("a quoted parameter of a part is not closed"))?;
        // Some parsers include an escaped quote in the value, and others end the value there.
        if value.ends_with(b"\\") {
            return Err(Error::Malformed("a parameter of a part contains an escaped quote: write %22"));
        }
        // Some parsers split at every semicolon, quoted or not.
        if value.split(|byte| *byte == b';').skip(1).any(|piece| piece.contains(&b'=')) {
            return Err(Error::Malformed("a parameter of a part contains another parameter"));
        }
        Ok(Self { key, value, rest })
    }
}

/// Reports whether the name has no quote, escape, encoding, or white space that a parser may remove.
fn is_plain_name(name: &[u8]) -> bool {
    name.iter().all(|byte| byte.is_ascii_graphic() && !b"\"\\%;'".contains(byte))
}

const fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#'
                | b'$'
                | b'%'
                | b'&'
                | b'\''
                | b'*'
                | b'+'
                | b'-'
                | b'.'
                | b'^'
                | b'_'
                | b'`'
                | b'|'
                | b'~'
        )
}
