//! Renders server patches, which use a subset of Go's `text/template`.
//!
//! Supported are the two fields of a node, comments, and markers that trim white space. Everything else is an error
//! that names it: Rouse must not apply a patch that means something else in Go.

/// The values that a template can refer to.
#[derive(Clone, Debug)]
pub struct TemplateFields<'a> {
    pub node: &'a str,
}

/// Why a template is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("'{{{{' in line {line} is never closed: add '}}}}' after it")]
    Unclosed { line: usize },
    #[error(
        "line {line} has {{{{{found}}}}}: use only {{{{ .NodeName }}}} and {{{{ .LocalVolume }}}}, and no functions \
         or conditions"
    )]
    Unknown { line: usize, found: String },
}

impl TemplateFields<'_> {
    fn get(&self, name: &str) -> Option<String> {
        match name {
            ".NodeName" => Some(self.node.to_owned()),
            ".LocalVolume" => Some(format!("{}-local", self.node)),
            _ => None,
        }
    }
}

/// Renders the template.
///
/// # Errors
/// See [`Error`]; it has the line of the mistake.
pub fn render(text: &str, fields: &TemplateFields<'_>) -> Result<String, Error> {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut line, mut trims) = (text, 1, false);
    while let Some((before, after)) = rest.split_once("{{") {
        line += lines(before);
        let action = TemplateAction::of(after).ok_or(Error::Unclosed { line })?;
        let before = if trims { before.trim_start() } else { before };
        out.push_str(if action.trims_before { before.trim_end() } else { before });
        if !action.is_comment() {
            let unknown = || Error::Unknown { line, found: action.inner.to_owned() };
            out.push_str(&fields.get(action.words).ok_or_else(unknown)?);
        }
        line += lines(action.inner);
        (rest, trims) = (action.after, action.trims_after);
    }
    out.push_str(if trims { rest.trim_start() } else { rest });
    Ok(out)
}

fn lines(text: &str) -> usize {
    text.bytes().filter(|byte| *byte == b'\n').count()
}

/// The content of one pair of double braces.
struct TemplateAction<'a> {
    inner: &'a str,
    words: &'a str,
    after: &'a str,
    trims_before: bool,
    trims_after: bool,
}

impl<'a> TemplateAction<'a> {
    fn of(text: &'a str) -> Option<Self> {
        // A comment may contain braces.
        let (inner, after) = match text.trim_start_matches("- ").strip_prefix("/*") {
            Some(comment) => {
                let skipped = text.len() - comment.len();
                let end = skipped + comment.find("*/")? + 2;
                let close = end + text.get(end..)?.find("}}")?;
                (text.get(..close)?, text.get(close + 2..)?)
            }
            None => text.split_once("}}")?,
        };
        // Go requires white space beside a trim marker; without it the `-` is a minus sign.
        let (trims_before, words) = match inner.strip_prefix('-') {
            Some(rest) if rest.starts_with(char::is_whitespace) => (true, rest),
            _ => (false, inner),
        };
        let (trims_after, words) = match words.strip_suffix('-') {
            Some(rest) if rest.ends_with(char::is_whitespace) => (true, rest),
            _ => (false, words),
        };
        Some(Self { inner, words: words.trim(), after, trims_before, trims_after })
    }

    fn is_comment(&self) -> bool {
        self.words.starts_with("/*") && self.words.ends_with("*/")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(text: &str) -> Result<String, String> {
        render(text, &TemplateFields { node: "somenode" }).map_err(|error| error.to_string())
    }

    #[test]
    fn fields_markers_and_comments_are_as_in_go() {
        for (text, wanted) in [
            ("", ""),
            ("a: b\n", "a: b\n"),
            ("{single} } {", "{single} } {"),
            ("claimName: {{ .LocalVolume }}\n", "claimName: somenode-local\n"),
            ("{{.NodeName}}{{.NodeName}}", "somenodesomenode"),
            ("a \n {{- .NodeName -}} \n b", "asomenodeb"),
            ("a {{- /* why }} */ -}} b", "ab"),
            ("a {{/* a comment */}} b", "a  b"),
            ("x {{ .NodeName -}}\n\n  {{- .NodeName }} y", "x somenodesomenode y"),
        ] {
            assert_eq!(rendered(text).as_deref(), Ok(wanted), "{text}");
        }
    }

    #[test]
    fn all_else_is_refused_with_its_line() {
        let known = "use only {{ .NodeName }} and {{ .LocalVolume }}, and no functions or conditions";
        for (text, wanted) in [
            ("a\nb {{ .Other }}", format!("line 2 has {{{{ .Other }}}}: {known}")),
            ("{{ if .NodeName }}", format!("line 1 has {{{{ if .NodeName }}}}: {known}")),
            ("{{-.NodeName}}", format!("line 1 has {{{{-.NodeName}}}}: {known}")),
            ("{{/*\n*/}}\n{{ . }}", format!("line 3 has {{{{ . }}}}: {known}")),
            ("\n{{ .NodeName", "'{{' in line 2 is never closed: add '}}' after it".to_owned()),
        ] {
            assert_eq!(rendered(text), Err(wanted), "{text}");
        }
    }
}
