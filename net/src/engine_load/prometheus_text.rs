//! Reads samples from a page in Prometheus' text format, which engines write under `/metrics`.
//!
//! Lines that are not samples are skipped, because a page has thousands of lines and readers want a few. A line's
//! value is parsed only for the samples whose names a reader knows.

use crate::quoted::closing_quote;

/// One sample: a series' name with its labels and value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetricSample<'a> {
    pub(crate) name: &'a [u8],
    /// Labels, value and timestamp.
    rest: &'a [u8],
}

/// Returns the samples of a page, in order.
pub(crate) fn samples(page: &[u8]) -> impl Iterator<Item = MetricSample<'_>> {
    page.split(|byte| *byte == b'\n').filter_map(MetricSample::parse)
}

impl<'a> MetricSample<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let line = line.trim_ascii();
        if line.first() == Some(&b'#') {
            return None;
        }
        let end = line.iter().position(|byte| matches!(byte, b'{' | b' ' | b'\t'))?;
        let (name, rest) = line.split_at_checked(end)?;
        Some(Self { name, rest })
    }

    /// The value; `None` if it is not readable. It may be infinite or not a number.
    pub(crate) fn value(&self) -> Option<f64> {
        let rest = self.rest.trim_ascii_start();
        let rest = match rest.strip_prefix(b"{") {
            Some(labels) => after_labels(labels)?,
            None => rest,
        };
        // A timestamp or an exemplar may follow.
        let value = rest.trim_ascii_start().split(u8::is_ascii_whitespace).next()?;
        str::from_utf8(value).ok()?.parse().ok()
    }

    /// The value of a label as it is written, with its escapes; `None` if the sample does not have the label.
    pub(crate) fn label(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.rest.trim_ascii_start().strip_prefix(b"{")?;
        loop {
            let equals = rest.iter().position(|byte| *byte == b'=')?;
            let (key, after) = rest.split_at_checked(equals)?;
            let value = after.strip_prefix(b"=")?.trim_ascii_start().strip_prefix(b"\"")?;
            let (value, after) = value.split_at_checked(closing_quote(value)?)?;
            let key = key.trim_ascii();
            if key.strip_prefix(b",").unwrap_or(key).trim_ascii() == name.as_bytes() {
                return str::from_utf8(value).ok();
            }
            rest = after.strip_prefix(b"\"")?;
        }
    }
}

/// Returns what follows the labels' closing brace. Quoted values may contain braces and escaped quotes.
fn after_labels(labels: &[u8]) -> Option<&[u8]> {
    let (mut quoted, mut escaped) = (false, false);
    let end = labels.iter().position(|byte| {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return true,
            _ => {}
        }
        false
    })?;
    labels.get(end + 1..)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(page: &str) -> Vec<(&str, Option<f64>)> {
        samples(page.as_bytes()).map(|it| (str::from_utf8(it.name).unwrap(), it.value())).collect()
    }

    #[test]
    fn labels_timestamps_and_exemplars_do_not_hide_the_value() {
        for line in [
            "m 2.5",
            "  m\t2.5\r",
            "m 2.5 1700000000000",
            "m{} 2.5",
            r#"m{a="b"}2.5"#,
            r#"m {a="b",} 2.5 1700000000000"#,
            r#"m{a="b } c",d="{"} 2.5"#,
            r#"m{a="say \"}\" 9",d="\\"} 2.5"#,
            r#"m{a="b"} 2.5 # {trace_id="x"} 7.0"#,
            "m 25e-1",
            "m +0.25E+1",
        ] {
            assert_eq!(read(line), [("m", Some(2.5))], "{line}");
        }
    }

    #[test]
    fn a_label_is_found_by_its_name_whatever_the_others_contain() {
        let label = |line: &'static str, name: &str| samples(line.as_bytes()).next().unwrap().label(name);
        for line in [
            r#"m{b="x"} 1"#,
            r#"m{a="b=\"y\",", b="x"} 1"#,
            r#"m{ab="y",b="x",} 1"#,
            r#"m{a="\\",b="x"} 1 # {b="y"} 2"#,
        ] {
            assert_eq!(label(line, "b"), Some("x"), "{line}");
        }
        for line in ["m 1", "m{} 1", r#"m{ab="x"} 1"#, r#"m{a="x"} 1 # {b="y"} 2"#, r#"m{b="x"#] {
            assert_eq!(label(line, "b"), None, "{line}");
        }
    }

    #[test]
    fn what_is_no_sample_is_skipped_and_what_is_no_number_has_no_value() {
        assert!(read("# HELP m 1\n# TYPE m gauge\n\n\r\nm\n").is_empty());
        for line in ["m ", "m{a=\"b\"}", "m{a=\"b} 1", "m x", "m 1,5", "m{a=\"b\\\"} 1", "m \u{661}"] {
            assert!(read(line).iter().all(|(_, value)| value.is_none()), "{line}");
        }
        let [(_, not_a_number), (_, infinite)] = read("m NaN\nm -Inf")[..] else { panic!("two samples") };
        assert!(not_a_number.is_some_and(f64::is_nan) && infinite == Some(f64::NEG_INFINITY));
        assert_eq!(read("a 1\nb 2").len(), 2, "the last line may lack its end");
    }
}
