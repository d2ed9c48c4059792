//! `api.cors`: pages of which origins may call the inference API.

use super::{
    reader::{Reader, Section},
    tree::Node,
};

/// The origins, as browsers write them. Empty: none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    pub origins: Vec<String>,
    /// `"*"` is among them.
    pub any: bool,
}

pub(super) fn cors(reader: &mut Reader, root: &mut Section) -> Cors {
    root.sub(reader, "api", |reader, api| {
        api.sub(reader, "cors", |reader, cors| {
            let origins = cors.read(reader, "origins", |reader, node| reader.list(node, origin));
            let mut origins = origins.unwrap_or_default();
            let any = origins.iter().any(|origin| origin == "*");
            origins.retain(|origin| origin != "*");
            Cors { origins, any }
        })
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
