//! `api`: how many threads serve it, and pages of which origins may call it (`api.cors`).

use super::{
    reader::{Reader, Section},
    tree::Node,
};

/// More than any machine has cores that are worth a listener each.
const MOST_THREADS: usize = 256;

/// The origins, as browsers write them. Empty: none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    pub origins: Vec<String>,
    /// `"*"` is among them.
    pub any: bool,
}

/// Threads, where a number of them is given, and origins.
pub(super) fn api(reader: &mut Reader, root: &mut Section) -> (Option<usize>, Cors) {
    root.sub(reader, "api", |reader, api| {
        let threads = api.read(reader, "threads", |reader, node| {
            let threads = reader.number(node)?;
            if !(1..=MOST_THREADS).contains(&threads) {
                reader.note(node.at, format_args!("is between 1 and {MOST_THREADS}"));
                return None;
            }
            Some(threads)
        });
        let cors = api.sub(reader, "cors", |reader, cors| {
            let origins = cors.read(reader, "origins", |reader, node| reader.list(node, origin));
            let mut origins = origins.unwrap_or_default();
            let any = origins.iter().any(|origin| origin == "*");
            origins.retain(|origin| origin != "*");
            Cors { origins, any }
        });
        (threads, cors)
    })
}

fn origin(reader: &mut Reader, node: &Node) -> Option<String> {
    let text = reader.text(node)?;
    let exact = text.split_once("://").is_some_and(|(scheme, host)| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
        !scheme.is_empty() && !host.is_empty() && host.chars().all(allowed)
    });
    if text == "*" || exact {
        return Some(text.to_ascii_lowercase());
    }
    reader.note(
        node.at,
        format_args!(
            "'{text}' is not an origin: write scheme://host or scheme://host:port, without a path, or \"*\""
        ),
    );
    None
}
